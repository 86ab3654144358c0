"""Flags: `--table.key=value`, the value read by the type of the key."""

from __future__ import annotations

import enum
import pathlib
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import tomli

from forge_core.config.layers import Layers
from forge_core.config.paths import Parts, dotted, split
from forge_core.config.shape import (
    default_at,
    element,
    is_literal,
    is_optional,
    is_table,
    members,
    tuple_types,
    type_at,
)
from forge_core.errors import Problem, UsageError

if TYPE_CHECKING:
    from forge_core.config.catalog import Catalog

_BOOLEANS = {"true": True, "True": True, "false": False, "False": False}
_UNREAD: Final = object()
_LONGEST = 100


@attrs.frozen
class Flag:
    """One flag of the command line.

    Attributes:
        token: as given, shortened and without line breaks; the origin of the value.
        parts: the path before "=".
        text: the text after "=", None without "=".
    """

    token: str
    parts: Parts
    text: str | None


def parse_flags(tokens: Sequence[str]) -> list[Flag]:
    """Cut tokens into paths and texts. Raises UsageError, naming every token that is no flag."""
    flags: list[Flag] = []
    errors: list[tuple[str, str]] = []
    for token in tokens:
        name, equals, text = token[2:].partition("=")
        if not token.startswith("--") or not name:
            before = flags[-1] if flags and not errors else None
            spaced = before is not None and before.text is None and not token.startswith("-")
            hint = (
                f"write {before.token}={token}"
                if before is not None and spaced
                else "write --table.key=value"
            )
            errors.append((_shown(token), hint))
            continue
        try:
            token.encode()
            flags.append(Flag(_shown(token), split(name), text if equals else None))
        except ValueError:
            errors.append((_shown(token), "write --table.key=value"))
    if errors:
        verb = "is not a flag" if len(errors) == 1 else "are not flags"
        names = ", ".join(f"'{token}'" for token, _ in errors)
        raise UsageError(f"{names} {verb}", errors[0][1])
    return flags


def apply_flags(layers: Layers, flags: Sequence[Flag], catalog: Catalog) -> list[Problem]:
    """Lay flags over the layers, in order. Returns what cannot be laid anywhere."""
    problems: list[Problem] = []
    for flag in _alive(flags):
        annotation = _type_of(catalog, flag)
        if flag.text is None and not _may_be_bare(annotation):
            hint = f"write {flag.token}=VALUE"
            problems.append(Problem(dotted(flag.parts), "this flag needs a value", hint, flag.token))
            continue
        try:
            _begin_lists(layers, flag, catalog)
            layers.put(
                flag.parts, True if flag.text is None else read_text(annotation, flag.text), flag.token
            )
        except LookupError as error:
            problems.append(Problem(dotted(flag.parts), str(error.args[0]), "", flag.token))
    return problems


def _shown(token: str) -> str:
    """A token on one line of printable text."""
    clean = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in token)
    return clean if len(clean) <= _LONGEST else clean[: _LONGEST - 3] + "..."


def _alive(flags: Sequence[Flag]) -> list[Flag]:
    """Flags without those of a table that a later flag turns off: reading them would load its plugin."""
    off = {
        flag.parts[0]: i
        for i, flag in enumerate(flags)
        if len(flag.parts) == 1 and _boolean(flag.text) is False
    }
    return [flag for i, flag in enumerate(flags) if i >= off.get(flag.parts[0], 0)]


def _type_of(catalog: Catalog, flag: Flag) -> Any | None:
    """The type of the key. Not of a whole table: `--name=false` must not load the plugin it turns off."""
    return None if len(flag.parts) == 1 else type_at(catalog, flag.parts)


def _may_be_bare(annotation: Any) -> bool:
    """A flag without "=" means true: for booleans, for tables, and where the key is unknown."""
    return annotation is None or any(kind is bool or is_table(kind) for kind in members(annotation))


def _begin_lists(layers: Layers, flag: Flag, catalog: Catalog) -> None:
    """Where a flag names an item of a list that no layer gives, start from the list's default."""
    for depth, part in enumerate(flag.parts):
        above = flag.parts[:depth]
        if not part.isdecimal() or not above or layers.get(above) is not None:
            continue
        kinds = members(type_at(catalog, above))
        if any(element(kind) is not None or tuple_types(kind) is not None for kind in kinds):
            default = default_at(catalog, above)
            layers.put(above, list(default) if isinstance(default, list) else [], flag.token)


def read_text(annotation: Any, text: str) -> Any:
    """A flag's text as the value TOML would hold for a key of this type; text that does not fit stays text.

    Args:
        annotation: type of the key, None where it is not known.
    """
    value = _toml(text)
    boolean = _boolean(text)
    if annotation is None:
        return _first(value, boolean, text)
    if is_optional(annotation) and text in ("none", "null"):
        return text
    kinds = members(annotation)
    if any(_is_text(kind) for kind in kinds):
        fitting = (boolean if kind is bool else value for kind in kinds if _fits(kind, value, boolean))
        return next(fitting, text)
    if any(_lists_text(kind) for kind in kinds) and not (bool in kinds and boolean is not _UNREAD):
        plain = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return value if plain else _words(text)
    return _first(value, boolean, text)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not _UNREAD)


def _fits(kind: Any, value: Any, boolean: Any) -> bool:
    """Whether a value, or a boolean written leniently, is of a type that stands beside text in a union."""
    if kind is bool:
        return boolean is not _UNREAD
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if is_literal(kind):
        return value in typing.get_args(kind)
    return not _is_text(kind) and isinstance(value, list | dict)


def _lists_text(kind: Any) -> bool:
    """Whether a type is a list of text, whose items may be written without quotes."""
    kinds = tuple_types(kind)
    of = kinds[0] if kinds is not None and kinds[-1] is ... else element(kind)
    return of is not None and any(_is_text(member) for member in members(of))


def _is_text(kind: Any) -> bool:
    if is_literal(kind):
        return all(isinstance(choice, str) for choice in typing.get_args(kind))
    return kind is str or (isinstance(kind, type) and issubclass(kind, pathlib.PurePath | enum.Enum))


def _boolean(text: str | None) -> Any:
    return _UNREAD if text is None else _BOOLEANS.get(text, _UNREAD)


def _words(text: str) -> list[str]:
    """`[jsonl,tensorboard]` or `jsonl,tensorboard` without quotes."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return [word.strip().strip("\"'") for word in inner.split(",") if word.strip()]


def _toml(text: str) -> Any:
    if "\n" in text:
        return _UNREAD
    try:
        return tomli.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return _UNREAD
