"""A configuration as TOML that loads again, each value with its origin."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.config.layers import DERIVED
from forge_core.config.paths import Parts, dotted, lookup
from forge_core.config.shape import Field, fields_of, is_optional, is_table, members, plain

if TYPE_CHECKING:
    from forge_core.config.config import Config


def write_config(config: Config) -> str:
    """All tables and the options of all components that were chosen or given."""
    derived = sorted(dotted(parts) for parts, origin in config._origins.items() if origin == DERIVED)
    lines = ["# Every value of a run, and where it comes from. This file is itself a configuration."]
    if derived:
        lines += ["# Derived values follow from the others anew when this file is loaded."]
        lines += [f"derived = {value(derived)}"]
    for name, table in config.tables.items():
        lines += ["", *_table(config, table, _Place((name,), (name,)))]
    return "\n".join(lines) + "\n"


def value(item: Any) -> str:
    """A value in TOML, on one line."""
    if isinstance(item, bool):
        return "true" if item else "false"
    if item is None:
        return '"none"'
    if isinstance(item, int | float):
        return repr(item)
    if isinstance(item, list | tuple):
        return f"[{', '.join(map(value, item))}]"
    if isinstance(item, Mapping):
        return "{" + ", ".join(f"{dotted((name,))} = {value(inner)}" for name, inner in item.items()) + "}"
    if isinstance(item, str):
        return json.dumps(item, ensure_ascii=False).replace("\x7f", "\\u007f")
    return item.isoformat() if hasattr(item, "isoformat") else value(str(getattr(item, "value", item)))


@attrs.frozen
class _Place:
    """Where a table is written: its path, and its header, which has no indices of arrays."""

    at: Parts
    head: Parts

    def inside(self, name: str) -> _Place:
        return _Place((*self.at, name), (*self.head, name))

    def item(self, index: int) -> _Place:
        return _Place((*self.at, str(index)), self.head)


def _table(config: Config, table: Any, place: _Place, array: bool = False) -> Iterator[str]:
    yield f"[[{dotted(place.head)}]]" if array else f"[{dotted(place.head)}]"
    sections: list[tuple[str, Any]] = []
    for name, field in fields_of(type(table)).items():
        item = getattr(table, name)
        if _is_section(item):
            sections.append((name, item))
        else:
            yield _line(config, field, item, (*place.at, name))
    for name, item in sections:
        yield from _section(config, item, place.inside(name))
    for (path, name), options in config._options.items():
        if options is not None and lookup(path) == place.at:
            yield from ("", *_table(config, options, place.inside(name)))


def _section(config: Config, item: Any, place: _Place) -> Iterator[str]:
    if is_table(type(item)):
        yield from ("", *_table(config, item, place))
    elif isinstance(item, Mapping) and any(is_table(type(inner)) for inner in item.values()):
        for name, inner in item.items():
            yield from _section(config, inner, place.inside(name))
    elif isinstance(item, Mapping):
        yield from ("", f"[{dotted(place.head)}]")
        for name, inner in item.items():
            yield f"{dotted((name,))} = {value(plain(inner))}{_origin(config, (*place.at, name))}"
    else:
        for i, inner in enumerate(item):
            yield from ("", *_table(config, inner, place.item(i), array=True))


def _is_section(item: Any) -> bool:
    """Whether a value is written under headers of its own."""
    if is_table(type(item)) or (isinstance(item, Mapping) and item):
        return True
    return isinstance(item, list | tuple) and bool(item) and all(is_table(type(inner)) for inner in item)


def _line(config: Config, field: Field, item: Any, at: Parts) -> str:
    name = dotted((field.name,))
    if item is None:
        unset = field.required or field.default() is not None
        table = any(is_table(kind) for kind in members(field.type)) and is_optional(field.type)
        if not unset:
            return f"# {name} is not set{': ' + field.key.derived if field.key.derived else ''}"
        return f"{name} = {'false' if table else value(None)}{_origin(config, at)}"
    return f"{name} = {value(plain(item))}{_origin(config, at)}"


def _origin(config: Config, at: Parts) -> str:
    origin = config.origin(dotted(at))
    return "  # " + "".join(char if char.isprintable() else " " for char in origin)
