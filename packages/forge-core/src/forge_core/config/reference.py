"""The reference of tables and keys, made from what the tables declare, as Markdown or as plain text."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from forge_core.config.leaves import show
from forge_core.config.paths import Parts, dotted
from forge_core.config.shape import (
    Field,
    categories,
    describe,
    element,
    entry,
    fields_of,
    is_table,
    members,
    plain,
)
from forge_core.config.values import bounds
from forge_core.errors import PluginError

if TYPE_CHECKING:
    from forge_core.config.catalog import Catalog


@attrs.frozen
class Row:
    """One key: its name, type, default, limits and help, in words."""

    key: str
    type: str
    default: str
    limits: str
    help: str


@attrs.frozen
class Section:
    """One table: its header as written in TOML, its help, its keys."""

    header: str
    help: str
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        """The header without brackets and quotation marks, as one types it."""
        return self.header.strip("[]").replace('"', "")


def sections(catalog: Catalog, names: Sequence[str] | None = None) -> Iterator[Section]:
    """The tables of the catalog (or those named), each followed by the tables in it and its options.

    A plugin that cannot be loaded is described by its error.
    """
    for name in catalog.table_names() if names is None else names:
        if "." in name:
            yield from _below(catalog, name)
            continue
        try:
            cls = catalog.table(name)
        except PluginError as error:
            yield Section(f"[{name}]", error.message, ())
            continue
        if cls is None:
            yield Section(f"[{name}]", "This table takes no keys.", ())
        else:
            yield from _sections(catalog, cls, (name,), f"[{name}]")


def reference(catalog: Catalog, names: Sequence[str] | None = None) -> str:
    """The reference as Markdown: a heading and a table of keys for each TOML table."""
    lines = ["# Configuration reference", ""]
    for section in sections(catalog, names):
        lines += [f"## `{section.header}`", "", section.help, ""]
        if section.rows:
            lines += ["| key | type | default | limits | meaning |", "|---|---|---|---|---|"]
            for row in section.rows:
                cells = (f"`{row.key}`", row.type, _code(row.default), row.limits, row.help)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            lines.append("")
    return "\n".join(lines)


def reference_text(catalog: Catalog, names: Sequence[str] | None = None) -> str:
    """The reference as plain text for a terminal."""
    lines: list[str] = []
    for section in sections(catalog, names):
        lines += [section.header, f"  {section.help}"]
        for row in section.rows:
            facts = [
                row.type,
                f"default {row.default}" if row.default != "required" else "required",
                row.limits,
            ]
            lines += [f"  {row.key}  ({'; '.join(fact for fact in facts if fact)})", f"      {row.help}"]
        lines.append("")
    return "\n".join(lines)


def _sections(
    catalog: Catalog, cls: type, at: Parts, header: str, around: tuple[type, ...] = ()
) -> Iterator[Section]:
    """A table and what is below it; options that it is in already, `around`, are not entered again."""
    fields = fields_of(cls)
    rows = tuple(_row(catalog, field) for field in fields.values())
    yield Section(header, inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " "), rows)
    for field in fields.values():
        for inner, form in _inner(field, (*at, field.name)):
            yield from _sections(catalog, inner, (*at, field.name), form, around)
    for category in dict.fromkeys(categories(cls).values()):
        for name in catalog.component_names(category):
            try:
                options = catalog.options(catalog.component(category, name))
            except PluginError:
                continue
            if options is not None and options not in around:
                here = (*at, name)
                yield from _sections(catalog, options, here, f"[{dotted(here)}]", (*around, options))


def _below(catalog: Catalog, name: str) -> Iterator[Section]:
    """The section of one table inside another, such as `data.text`, and what is below it."""
    outer = name.partition(".")[0]
    for section in sections(catalog, [outer]):
        if f"{section.name}.".startswith(f"{name}."):
            yield section


def _inner(field: Field, at: Parts) -> Iterator[tuple[type, str]]:
    """The tables that a key holds, with the header each is written under."""
    for kind in members(field.type):
        of, named = element(kind), entry(kind)
        if is_table(kind):
            yield kind, f"[{dotted(at)}]"
        elif of is not None and is_table(of):
            yield of, f"[[{dotted(at)}]]"
        elif named is not None and is_table(named):
            yield named, f"[{dotted(at)}.NAME]"


def _row(catalog: Catalog, field: Field) -> Row:
    key = field.key
    limits = bounds(key)
    if key.choices is not None:
        limits = ", ".join(show(choice) for choice in key.choices)
    elif key.component is not None:
        article = "an" if key.component[0] in "aeiou" else "a"
        names = ", ".join(catalog.component_names(key.component)) or "none installed"
        limits = f"{article} {key.component}: {names}"
    kind = describe(field.type) + (f" ({key.unit})" if key.unit else "")
    return Row(field.name, kind, _default(field), limits, key.help)


def _default(field: Field) -> str:
    if field.required:
        return "required"
    default = field.default()
    if default is None or (default == "" and field.key.derived):
        return field.key.derived or "not set"
    return "a table" if is_table(type(default)) else show(plain(default))


def _code(default: str) -> str:
    return (
        f"`{default}`"
        if default[:1] in '["' or default[:1].isdigit() or default in ("true", "false")
        else default
    )
