"""What the README and the pages tell people to type works."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:^(?:    .*)?\n)+", re.MULTILINE)


def configurations() -> list[str]:
    """Indented blocks of the pages that are configuration files."""
    blocks = [textwrap.dedent(block) for page in PAGES for block in BLOCK.findall(page.read_text())]
    return [block.strip() for block in blocks if block.strip().startswith("extends = ")]


def test_ci_runs_the_test_line_of_the_readme() -> None:
    (line,) = set(re.findall(r"^    (python3 bootstrap\.py tests)$", PAGES[0].read_text(), re.MULTILINE))
    assert re.search(rf"^{re.escape(line)}$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def test_sessions_that_pages_name_exist() -> None:
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    named = {
        name
        for page in PAGES
        for name in re.findall(r"(?:bootstrap\.py|nox -s) ([a-z]\w*)", page.read_text())
    }
    assert named
    assert named - sessions == set()


def test_links_between_files_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_there_are_configurations_to_try() -> None:
    assert len(configurations()) >= 2


@pytest.mark.parametrize("text", configurations())
def test_configurations_in_pages_have_no_problems(text: str, tmp_path: Path) -> None:
    check(text, tmp_path)


def check(text: str, tmp_path: Path) -> None:
    """`forge check` of a configuration, which has to find nothing."""
    (tmp_path / "run.toml").write_text(text)
    command = [sys.executable, "-m", "forge_core", "check", "run.toml"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
