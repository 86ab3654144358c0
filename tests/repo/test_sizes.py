"""Functions and modules stay small enough to be read at once."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("packages/forge-*/src/**/*.py")) + sorted((ROOT / "scripts").glob("*.py"))

LINES_OF_A_FUNCTION = 60  # signature and body; the docstring may take the room it needs
LINES_OF_A_MODULE = 350
EXCEPTIONS: dict[str, str] = {}
"""`path` or `path::function` -> why it may be longer."""


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    if ast.get_docstring(node) is None or first.end_lineno is None:
        return 0
    return first.end_lineno - first.lineno + 1


def measured() -> dict[str, int]:
    """Lines of everything above its limit, by the name it would have in EXCEPTIONS."""
    long: dict[str, int] = {}
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        if text.count("\n") > LINES_OF_A_MODULE:
            long[name] = text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1 - docstring_lines(node)
                if lines > LINES_OF_A_FUNCTION:
                    long[f"{name}::{node.name}"] = lines
    return long


def test_nothing_is_longer_than_it_may_be() -> None:
    long = measured()
    assert {name: lines for name, lines in long.items() if name not in EXCEPTIONS} == {}


def test_every_exception_is_needed_and_has_a_reason() -> None:
    assert set(EXCEPTIONS) <= set(measured())
    assert all(EXCEPTIONS.values())
