"""No dead keys: what a table declares, some code reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import forge_core
from forge_core.config.shape import fields_of
from forge_core.config.tables import CORE_TABLES

NOT_YET = {"loss.chunk_size"}
"""Keys whose reader is still being written; empty in the end."""

ROOT = Path(forge_core.__file__).parent


def attributes_read() -> set[str]:
    """Names of all attributes read in the core; of the tables themselves only where values are derived."""
    found: set[str] = set()
    for path in ROOT.rglob("*.py"):
        tree: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
        parts = [tree]
        if ROOT / "config" in path.parents:
            parts = [
                node
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef) and node.name == "resolve"
            ]
        for node in (inner for part in parts for inner in ast.walk(part)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
    return found


def keys(cls: type, at: str) -> Iterator[tuple[str, str]]:
    for name, field in fields_of(cls).items():
        yield f"{at}.{name}", name
        for inner in field.tables:
            yield from keys(inner, f"{at}.{name}")


def test_every_key_of_the_core_is_read_somewhere() -> None:
    """By name only: a key that shares its name with something else that is read passes unseen."""
    read = attributes_read()
    unread = [path for name, cls in CORE_TABLES.items() for path, key in keys(cls, name) if key not in read]
    assert set(unread) <= NOT_YET, f"keys that nothing reads: {', '.join(unread)}"
