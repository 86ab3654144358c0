"""Reading configuration files and what they extend; one clear problem for each that cannot be read."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import Any

import tomli

from forge_core.config.layers import Layers
from forge_core.config.paths import split
from forge_core.config.recipes import find_recipe, recipe_names
from forge_core.config.suggest import did_you_mean, nearest
from forge_core.errors import ConfigError, ForgeError, Problem
from forge_core.files import user_path

EXTENDS = "extends"
DERIVED_KEYS = "derived"
PATIENCE = 2.0
"""Seconds without a word about a pipe that nobody writes to."""
_PLACE = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)\Z")
_SYNTAX_HINTS = {
    "Invalid value": "text needs quotes; booleans are true and false",
    "Expected '=' after a key": "a key and its value are written key = value",
    "Cannot overwrite": "the key or table is there twice",
    "Cannot declare": "the key or table is there twice",
}


def read_layers(source: str | Path | None) -> Layers:
    """Read a file or recipe and everything it extends, bases first.

    Args:
        source: path of a TOML file, name of a recipe, or None for no file.

    Raises:
        ConfigError: one problem for each file that cannot be read.
    """
    layers = Layers()
    if source is None:
        return layers
    problems: list[Problem] = []
    _add(layers, *_locate(source, Path(), problems, None), (), problems)
    if problems:
        raise ConfigError(problems)
    return layers


def read_toml(path: Path, name: str) -> dict[str, Any]:
    """Parse a file. Raises ConfigError with one problem whose origin is `name` (and the line, for syntax)."""
    try:
        text = _bytes(path, name).decode("utf-8-sig")
    except IsADirectoryError:
        inside = path / "config.toml"
        hint = f"did you mean {inside}?" if inside.is_file() else "give a TOML file in it"
        raise ConfigError([Problem("", "is a folder, not a configuration file", hint, name)]) from None
    except FileNotFoundError:
        raise ConfigError([Problem("", "no such file", _near_files(path), name)]) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        message = f"is not UTF-8 text (byte 0x{error.object[error.start]:02x})"
        raise ConfigError([Problem("", message, "save it as UTF-8", f"{name}:{line}")]) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError([Problem("", f"cannot be read: {reason}", "", name)]) from None
    try:
        return tomli.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([_syntax(str(error), text, name)]) from None


def _bytes(path: Path, name: str) -> bytes:
    """What is in a file; of a pipe that nobody has written to for a while, it is said what is waited for."""
    if not path.is_fifo():
        return path.read_bytes()
    line = f"waiting for what is written to {name}, which is a pipe"
    told = threading.Timer(PATIENCE, print, (line,), {"file": sys.stderr})
    told.daemon = True
    told.start()
    try:
        return path.read_bytes()
    finally:
        told.cancel()


def _syntax(message: str, text: str, name: str) -> Problem:
    place = _PLACE.search(message)
    line, column = text.count("\n") + 1, ""
    if place is not None:
        message = message[: place.start()]
        if place[1]:
            line, column = int(place[1]), f":{place[2]}"
        else:
            line = len(text.rstrip().splitlines()) or 1
    hint = next((hint for start, hint in _SYNTAX_HINTS.items() if message.startswith(start)), "")
    where = f"{name}:{line}{column}" if place is not None else name
    return Problem("", f"TOML syntax: {message[:1].lower()}{message[1:]}", hint, where)


def _add(
    layers: Layers, path: Path | None, name: str, above: tuple[Path, ...], problems: list[Problem]
) -> None:
    """Add a file on top of `layers`, after the files it extends; `above` are the files that led here."""
    if path is None:
        return
    real = path.resolve() if _exists(path) else path
    if real in above:
        names = {known: label for label, known in layers.files.items()}
        chain = " -> ".join([*(names.get(file, file.name) for file in above[above.index(real) :]), name])
        problems.append(Problem(EXTENDS, f"goes in a circle: {chain}", "", names.get(above[-1], name)))
        return
    try:
        values = read_toml(path, name)
    except ConfigError as error:
        problems += error.problems
        return
    layers.files[name] = real
    for base in _bases(values.pop(EXTENDS, []), name, problems):
        _add(layers, *_locate(base, path.parent, problems, name), (*above, real), problems)
    _drop_derived(values, name, problems)
    layers.merge(values, name)
    layers.source = name


def _bases(value: Any, name: str, problems: list[Problem]) -> list[str]:
    bases = [value] if isinstance(value, str) else value
    if isinstance(bases, list) and all(isinstance(base, str) and base for base in bases):
        return bases
    problems.append(Problem(EXTENDS, "expected a path, the name of a recipe, or a list of these", "", name))
    return []


def _drop_derived(values: dict[str, Any], name: str, problems: list[Problem]) -> None:
    """Leave out the values that a resolved file lists as derived: they follow from the others once more."""
    listed = values.pop(DERIVED_KEYS, [])
    if not isinstance(listed, list) or not all(isinstance(path, str) for path in listed):
        problems.append(Problem(DERIVED_KEYS, "expected a list of dotted keys", "", name))
        return
    for path in listed:
        try:
            holder = Layers(tree=values)
            *way, last = split(path)
            table = holder.get(tuple(way))
        except ValueError:
            problems.append(Problem(DERIVED_KEYS, f"{path!r} is not a dotted key", "", name))
            continue
        if isinstance(table, dict):
            table.pop(last, None)


def _locate(
    source: str | Path, folder: Path, problems: list[Problem], origin: str | None
) -> tuple[Path | None, str]:
    """The path and the name of a source; a bare word is a recipe first, then a file."""
    text = str(source)
    is_path = isinstance(source, Path) or text.endswith(".toml") or "/" in text or "\\" in text
    path = folder / user_path(text)
    shown = str(path)
    if is_path:
        if origin is not None and not _exists(path):
            problems.append(Problem(EXTENDS, f"{text}: no such file", _near_files(path), origin))
            return None, shown
        return path, shown
    try:
        recipe = find_recipe(text)
    except ForgeError as error:
        problems.append(Problem(EXTENDS if origin else "", error.message, error.hint, origin))
        return None, shown
    if recipe is not None:
        return recipe, f"recipe {text}"
    if _exists(path):
        return path, shown
    names = recipe_names()
    near = nearest(text, names)
    hint = did_you_mean(near) or f"recipes: {', '.join(names)}; a file ends in .toml"
    problems.append(Problem(EXTENDS if origin else "", f"no recipe or file is called {text!r}", hint, origin))
    return None, shown


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long
        return False


def _near_files(path: Path) -> str:
    """A suggestion for a path that does not exist: a near file or recipe, or the missing folder."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    try:
        files = sorted(file.name for file in folder.iterdir() if file.suffix == ".toml" and file.is_file())
    except OSError:
        files = []
    near = [str(folder / name) for name in nearest(path.name, files)]
    recipes = [f"recipe {name}" for name in nearest(path.stem, recipe_names())]
    return did_you_mean([*near, *recipes])
