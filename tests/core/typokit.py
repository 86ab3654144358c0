"""Configurations with one key misspelt, and whether the report suggests the right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_core.config import ConfigError, load_config
from forge_core.config.writing import value as as_toml
from forge_core.plugins import PluginCatalog


def typos(word: str) -> Iterator[str]:
    """Every single deletion and swap, and an insertion at every place."""
    for i in range(len(word)):
        yield word[:i] + word[i + 1 :]
        if i + 1 < len(word):
            yield word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    for i in range(len(word) + 1):
        yield word[:i] + "aeionrstlx"[(7 * i + len(word)) % 10] + word[i:]


def places(tree: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key and every table."""
    pairs = tree.items() if isinstance(tree, dict) else ((str(i), item) for i, item in enumerate(tree))
    for name, inner in pairs:
        if isinstance(tree, dict):
            yield (*at, name)
        if isinstance(inner, dict) or (isinstance(inner, list) and inner and isinstance(inner[0], dict)):
            yield from places(inner, (*at, name))


def misspelt(tree: Any, path: tuple[str, ...], word: str) -> Any:
    """A copy of a tree with the last key of `path` spelt `word`."""
    if isinstance(tree, list):
        return [misspelt(item, path[1:], word) if str(i) == path[0] else item for i, item in enumerate(tree)]
    if len(path) == 1:
        return {word if name == path[0] else name: inner for name, inner in tree.items()}
    return {
        name: misspelt(inner, path[1:], word) if name == path[0] else inner for name, inner in tree.items()
    }


def sweep(
    path: Path, catalog: PluginCatalog, tree: dict[str, Any], chosen: Callable[[str], list[str]]
) -> tuple[int, int, list[tuple[str, str]]]:
    """Load the tree, and again with each chosen misspelling of each key, which has to be refused.

    Returns:
        Misspellings tried, those with the right key among the suggestions, and (path, word) of the others.
    """
    tried, helped, missed = 0, 0, []
    write(path, tree)
    load_config(path, catalog=catalog)
    for place in sorted(set(places(tree))):
        for word in chosen(place[-1]):
            if not word or word == place[-1] or accepted(catalog, (*place[:-1], word)):
                continue
            write(path, misspelt(tree, place, word))
            with pytest.raises(ConfigError) as caught:
                load_config(path, catalog=catalog)
            tried += 1
            hints = [p.hint for p in caught.value.problems if p.path.endswith(word)]
            assert hints, f"{word} of {place} is not what the report is about: {caught.value}"
            if any(names(hint, place) for hint in hints):
                helped += 1
            else:
                missed.append((".".join(place), word))
    return tried, helped, missed


def write(path: Path, tree: dict[str, Any]) -> None:
    path.write_text("\n".join(f"{as_key(name)} = {as_toml(inner)}" for name, inner in tree.items()))


def accepted(catalog: PluginCatalog, place: tuple[str, ...]) -> bool:
    """Whether the misspelt key happens to be another key that exists."""
    from forge_core.config.shape import type_at

    return type_at(catalog, place) is not None


def names(hint: str, place: tuple[str, ...]) -> bool:
    words = hint.replace("?", " ").replace(",", " ").replace("[", "").replace("]", "").split()
    return "did you mean" in hint and (place[-1] in words or ".".join(place) in words)


def as_key(name: str) -> str:
    return name if name.replace("_", "").isalnum() and name.isascii() else f'"{name}"'
