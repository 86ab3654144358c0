"""Documentation and tests keep up with the hooks, and the README with its own commands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOOKSPECS = ROOT / "packages/forge-core/src/forge_core/hookspecs.py"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
README = (ROOT / "README.md").read_text()


def signatures() -> dict[str, str]:
    """Hook -> `name(argument: Type, ...) -> Type`, as a heading in docs/ must have it."""
    functions = [node for node in ast.parse(HOOKSPECS.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {
        node.name: f"{node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"
        for node in functions
        if node.name.startswith("forge_") and node.returns is not None
    }


def headings() -> set[str]:
    lines = [line for page in PAGES for line in page.read_text().splitlines() if re.match(r"#+ ", line)]
    return {line.lstrip("# ").strip("`") for line in lines}


def hook_tests() -> set[str]:
    """Names of tests of hooks, as far as they follow `test_hook_`; `forge_` may be left out."""
    found = re.compile(r"^ *(?:async )?def test_hook_(?:forge_)?(\w+)", re.MULTILINE)
    return {name for path in (ROOT / "tests").rglob("test_*.py") for name in found.findall(path.read_text())}


DOCUMENTED = any(heading.startswith("forge_") for heading in headings())
TESTED = bool(hook_tests())


def test_every_hook_says_what_it_is() -> None:
    for node in ast.parse(HOOKSPECS.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("forge_"):
            assert ast.get_docstring(node), node.name


@pytest.mark.skipif(not DOCUMENTED, reason="no hook has a heading in docs/ yet")
def test_every_hook_has_a_heading_with_its_signature() -> None:
    assert set(signatures().values()) - headings() == set()


@pytest.mark.skipif(not DOCUMENTED, reason="no hook has a heading in docs/ yet")
def test_no_heading_is_of_a_hook_that_is_gone() -> None:
    hooks = {heading for heading in headings() if re.match(r"forge_\w+\(", heading)}
    assert hooks - set(signatures().values()) == set()


@pytest.mark.skipif(not TESTED, reason="no hook has a test yet")
def test_every_hook_has_a_test_of_its_name() -> None:
    hooks = {name.removeprefix("forge_") for name in signatures()}
    assert {hook for hook in hooks if not any(test.startswith(hook) for test in hook_tests())} == set()


def test_ci_runs_the_test_line_of_the_readme() -> None:
    (line,) = set(re.findall(r"^    (python3 bootstrap\.py tests)$", README, re.MULTILINE))
    assert re.search(rf"^{re.escape(line)}$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def test_sessions_that_pages_name_exist() -> None:
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    pages = [README, *(path.read_text() for path in (ROOT / "CONTRIBUTING.md", *PAGES))]
    named = {name for page in pages for name in re.findall(r"(?:bootstrap\.py|nox -s) ([a-z]\w*)", page)}
    assert named
    assert named - sessions == set()
