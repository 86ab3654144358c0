"""Tables: keys become fields, sub-tables component options, and all else a problem with a suggestion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.config.fields import Key
from forge_core.config.paths import Parts, dotted
from forge_core.config.shape import Field, NoKeys, categories, fields_of, is_table, option_class
from forge_core.config.suggest import did_you_mean, nearest, suggest_key
from forge_core.config.values import BAD, ValueReader
from forge_core.errors import PluginError

if TYPE_CHECKING:
    from forge_core.config.catalog import Catalog


@attrs.frozen
class Chosen:
    """A component that a configuration picks.

    Attributes:
        table: dotted path of the table with the key that picks it, e.g. "optimizer".
        key: that key, e.g. "name".
        category: of the component.
        name: as the user wrote it, e.g. "muon" or "mine/part".
    """

    table: str
    key: str
    category: str
    name: str


class TableReader(ValueReader):
    """Reads tables, and gathers the options of components by (path of the table, name of the component)."""

    def __init__(self, catalog: Catalog) -> None:
        super().__init__()
        self.catalog = catalog
        self.options: dict[tuple[str, str], Any] = {}

    def read_table(self, cls: type, values: Mapping[str, Any], at: Parts, base: Any = None) -> Any:
        fields = fields_of(cls)
        usable = self._usable(cls, values, at)
        arguments: dict[str, Any] = {}
        for name, field in fields.items():
            arguments[field.attribute.alias or name] = self._field(field, usable, at, base)
        try:
            table = cls(**arguments)
        except (ValueError, TypeError) as error:
            return self.fail(at, str(error.args[0] if error.args else error))
        self.choose(table, at)
        return table

    def choose(self, table: Any, at: Parts) -> None:
        """Check the components that a table picks, and give each its options, by default the defaults."""
        for pick in picked(table, dotted(at)):
            path = (*at, pick.key)
            try:
                component = self.catalog.component(pick.category, pick.name)
                options = self.catalog.options(component)
            except KeyError:
                known = self.catalog.component_names(pick.category)
                hint = f"{did_you_mean(nearest(pick.name, known))} known: {', '.join(known) or 'none'}"
                self.fail(path, f"there is no {pick.category} {pick.name!r}", hint.strip())
            except PluginError as error:
                self.fail(path, error.message, error.hint)
            else:
                if options is None:
                    self.options.setdefault((dotted(at), pick.name), None)
                elif (dotted(at), pick.name) not in self.options:
                    self._read_options(options, {}, (*at, pick.name))

    def _field(self, field: Field, values: Mapping[str, Any], at: Parts, base: Any) -> Any:
        here = (*at, field.name)
        default = (
            getattr(base, field.name) if base is not None else None if field.required else field.default()
        )
        if field.name not in values:
            if field.required and base is None:
                self.fail(here, "is required", field.key.help)
            elif is_table(type(default)):
                return self.read_table(type(default), {}, here, default)
            return default
        value = self.read_key(field.type, field.key, values[field.name], here, default)
        return default if value is BAD else value

    def _usable(self, cls: type, values: Mapping[str, Any], at: Parts) -> dict[str, Any]:
        """The values under known keys; reads component options on the way and reports unknown keys.

        A misspelt key counts as the key it was meant to be, so that nothing complains that that is missing.
        """
        fields = fields_of(cls)
        usable = {name: value for name, value in values.items() if name in fields}
        for name, value in values.items():
            if name in fields or self._is_options(cls, name, value, at):
                continue
            meant = self._unknown(cls, name, at)
            if meant in fields and meant not in values:
                usable[meant] = value
                self._quietly(fields[meant].type, fields[meant].key, usable, meant, at)
        return usable

    def _quietly(self, annotation: Any, key: Key, values: dict[str, Any], name: str, at: Parts) -> None:
        """Drop a value under a mended key again if it does not fit."""
        before = len(self.problems)
        if self.read_key(annotation, key, values[name], (*at, name)) is BAD or len(self.problems) > before:
            del values[name]
        del self.problems[before:]

    def _is_options(self, cls: type, name: str, value: Any, at: Parts) -> bool:
        here = (*at, name)
        try:
            options = option_class(self.catalog, cls, name)
        except PluginError as error:
            self.fail(here, error.message, error.hint)
            return True
        if options is None:
            return False
        if isinstance(value, Mapping) or value is True:
            self._read_options(options, {} if value is True else value, here)
        else:
            self.fail(here, "expected a table with the options of this component", f"write [{dotted(here)}]")
        return True

    def _read_options(self, options: type, values: Mapping[str, Any], at: Parts) -> None:
        instance = self.read_table(options, values, at)
        if instance is not BAD and options is not NoKeys:
            self.options[dotted(at[:-1]), at[-1]] = instance

    def _unknown(self, cls: type, name: str, at: Parts) -> str:
        """Report a key that the table does not have; returns the key it was meant to be, or ""."""
        own = [*fields_of(cls), *self._component_names(cls)]
        near = suggest_key(self.catalog, at, name, own, cls)
        keys = f"keys: {', '.join(fields_of(cls))}" if fields_of(cls) else "it takes no keys"
        self.fail((*at, name), f"unknown key in [{dotted(at)}]", did_you_mean(near) or keys)
        return near[0] if len(near) == 1 and near[0] in own else ""

    def _component_names(self, cls: type) -> Iterator[str]:
        for category in categories(cls).values():
            for name in self.catalog.component_names(category):
                component = self.catalog.component(category, name)
                if component.options is not None:
                    yield name


def picked(table: Any, path: str) -> Iterator[Chosen]:
    """The components that a table itself picks (not those of tables within it)."""
    for name, category in categories(type(table)).items():
        value = getattr(table, name)
        for item in [value] if isinstance(value, str) else value or ():
            if isinstance(item, str):
                yield Chosen(path, name, category, item)


def walk(table: Any, at: Parts) -> Iterator[tuple[Parts, Any]]:
    """A table and all tables within it, with their paths, inner ones first."""
    for field in fields_of(type(table)).values():
        if field.tables:
            yield from _walk_value(getattr(table, field.name), (*at, field.name))
    yield at, table


def _walk_value(value: Any, at: Parts) -> Iterator[tuple[Parts, Any]]:
    if is_table(type(value)):
        yield from walk(value, at)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for i, inner in enumerate(value):
            yield from _walk_value(inner, (*at, str(i)))
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _walk_value(inner, (*at, name))
