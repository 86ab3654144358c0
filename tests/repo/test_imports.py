"""Who may import whom, and what must not import torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {path.parent.name: path for path in sorted(ROOT.glob("packages/forge-*/src"))}
FAMILIES = sorted(name for name in SOURCES if name != "forge-core")
MODULES = {name: name.replace("-", "_") for name in SOURCES}
PRIVATE = ("builtin",)
"""Parts of the core that are no public module, beside those with an underscore."""

LIGHT = (
    "builtin",
    "commands",
    "config",
    "contract",
    "plugins",
    "errors",
    "hookspecs",
    "markers",
    "recipes",
    "version",
)
"""Parts of the core that commands which only look (help, check, plugins, config) import."""

APART = ("model", "loss", "optim", "data", "metrics")
SHARED = (
    "forge_core.loss.",
    "forge_core.data.tokenizer.",
    "forge_core.loop.seeds.",
    "forge_core.loop.naming.",
)
"""What those parts of the core may use of each other and of the loop."""


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, absolute module and whether it is only for type checkers, of each import in a file."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}", id(node) in typing_only
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in typing_only


def offences(package: str, forbidden: object) -> list[str]:
    assert callable(forbidden)
    root = SOURCES[package]
    return [
        f"{path.relative_to(root)}:{line}: {module}"
        for path in sorted(root.rglob("*.py"))
        for line, module, _ in imports(path)
        if forbidden(module)
    ]


def test_core_imports_no_family() -> None:
    names = {MODULES[name] for name in FAMILIES}
    assert offences("forge-core", lambda module: module.partition(".")[0] in names) == []


@pytest.mark.parametrize("part", APART)
def test_parts_of_the_core_do_not_know_each_other(part: str) -> None:
    """As the page on architecture says; session and loop are looked at as types alone."""
    root = SOURCES["forge-core"] / "forge_core"
    others = tuple(f"forge_core.{other}." for other in (*APART, "loop") if other != part)
    found = [
        f"{path.relative_to(root)}:{line}: {module}"
        for path in sorted((root / part).rglob("*.py"))
        for line, module, typing_only in imports(path)
        if module.startswith(others) and not module.startswith(SHARED) and not typing_only
    ]
    assert found == []


def is_private(module: str) -> bool:
    """Whether a dotted name reaches into the inside of a package of this repository."""
    package, *rest = module.split(".")
    if package not in MODULES.values():
        return False
    inside = any(part.startswith("_") and not part.startswith("__") for part in rest)
    return inside or (package == "forge_core" and rest[:1] in ([name] for name in PRIVATE))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_import_public_modules_only(family: str) -> None:
    own = MODULES[family]
    assert offences(family, lambda module: module.partition(".")[0] != own and is_private(module)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_families_import_each_other_only_as_declared_extras(family: str) -> None:
    declared = (ROOT / "packages" / family / "pyproject.toml").read_text()
    others = {MODULES[name] for name in FAMILIES if name != family and f'"{name}' not in declared}
    assert offences(family, lambda module: module.partition(".")[0] in others) == []


def light_modules() -> list[str]:
    core = SOURCES["forge-core"] / "forge_core"
    files = [
        path
        for part in LIGHT
        for path in (core / f"{part}.py", *(core / part).rglob("*.py"))
        if path.exists()
    ]
    names = {".".join(path.relative_to(core.parent).with_suffix("").parts) for path in files}
    plugins = [f"{MODULES[name]}.plugin" for name in FAMILIES]
    return sorted(name.removesuffix(".__init__") for name in {*names, "forge_core", *plugins})


def test_what_only_looks_imports_no_torch() -> None:
    """All in one process; the check after each import names the module that brought torch in."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} imports torch')\n"
    )
    path = os.pathsep.join(map(str, SOURCES.values()))
    done = subprocess.run(
        [sys.executable, "-c", code, *light_modules()],
        env={"PYTHONPATH": path, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["check", "quickstart"], ["plugins"], ["config", "reference"]], ids=" ".join
)
def test_commands_that_only_look_import_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from forge_core.commands.main import main\n"
        "status = main(sys.argv[1:])\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
