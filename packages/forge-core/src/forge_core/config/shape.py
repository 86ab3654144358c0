"""What a table looks like: its fields with resolved types, and the type found at a dotted path."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.config.fields import Key, key_of, table
from forge_core.errors import PluginError

if TYPE_CHECKING:
    from forge_core.config.catalog import Catalog
    from forge_core.config.paths import Parts

_LISTS = (list, collections.abc.Sequence)
_DICTS = (dict, collections.abc.Mapping)
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Any: "anything",
}


_FIELDS: dict[type[Any], Mapping[str, Field]] = {}


@table
class NoKeys:
    """A table that takes no keys."""


@attrs.frozen
class Field:
    """One key of a table with its resolved type.

    Attributes:
        name: the key.
        type: its Python type, resolved.
        key: what was declared about it.
        attribute: the attrs attribute.
        tables: the table classes reachable through the type.
    """

    name: str
    type: Any
    key: Key
    attribute: attrs.Attribute[Any]
    tables: tuple[type, ...] = attrs.field(
        init=False, default=attrs.Factory(lambda self: tuple(inner_tables(self.type)), takes_self=True)
    )

    @property
    def required(self) -> bool:
        """Whether the key has no default."""
        return self.attribute.default is attrs.NOTHING

    def default(self) -> Any:
        """The default, made anew where the declaration has a factory."""
        default: Any = self.attribute.default
        factory = getattr(default, "factory", None)
        return default if factory is None else factory()


def fields_of(cls: type[Any]) -> Mapping[str, Field]:
    """The fields of a table in order of declaration. TypeError if `cls` is no table or a type is unknown."""
    if cls not in _FIELDS:
        _FIELDS[cls] = _read_fields(cls)
    return _FIELDS[cls]


def _read_fields(cls: type[Any]) -> Mapping[str, Field]:
    try:
        hints = typing.get_type_hints(cls, include_extras=False)
    except NameError as error:
        raise TypeError(
            f"{cls.__module__}.{cls.__qualname__}: the type of a key is not known: {error}"
        ) from error
    return {
        attribute.name: Field(attribute.name, hints[attribute.name], key_of(attribute), attribute)
        for attribute in attrs.fields(cls)
    }


def is_table(annotation: Any) -> bool:
    """Whether a type is an attrs class, that is a table of its own."""
    return isinstance(annotation, type) and attrs.has(annotation)


def is_literal(annotation: Any) -> bool:
    """Whether a type is `Literal[...]`."""
    origin: Any = typing.get_origin(annotation)
    return origin is typing.Literal


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union without None; any other type is its own only member."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(member for member in typing.get_args(annotation) if member is not type(None))
    return (annotation,)


def is_optional(annotation: Any) -> bool:
    """Whether None is allowed."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return union and type(None) in typing.get_args(annotation)


def element(annotation: Any) -> Any | None:
    """The type of the elements of a list, else None."""
    if typing.get_origin(annotation) in _LISTS:
        return typing.get_args(annotation)[0]
    return Any if annotation is list else None


def tuple_types(annotation: Any) -> tuple[Any, ...] | None:
    """The types of a tuple (`(x, ...)` for any length), else None."""
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)
    return (Any, ...) if annotation is tuple else None


def entry(annotation: Any) -> Any | None:
    """The type of the values of a dict with text keys, else None."""
    if typing.get_origin(annotation) in _DICTS:
        return typing.get_args(annotation)[1]
    return Any if annotation is dict else None


def inner_tables(annotation: Any) -> list[type]:
    """The table classes reachable through unions, lists, tuples and dicts of a type."""
    found: list[type] = []
    for member in members(annotation):
        if is_table(member):
            found.append(member)
        else:
            parts = (element(member), entry(member), *(tuple_types(member) or ()))
            for part in parts:
                if part is not None and part is not ... and part is not Any:
                    found += inner_tables(part)
    return found


def describe(annotation: Any) -> str:
    """A type in words: "integer", "list of text", "2 numbers", ..."""
    alternatives = members(annotation)
    if len(alternatives) > 1:
        return " or ".join(describe(member) for member in alternatives)
    only = alternatives[0]
    if only in _WORDS:
        return _WORDS[only]
    if is_literal(only):
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(only))
    if (of := element(only)) is not None:
        return "list of tables" if is_table(of) else f"list of {describe(of)}"
    if (kinds := tuple_types(only)) is not None:
        if kinds[-1] is ...:
            return f"list of {describe(kinds[0])}"
        return "list of " + ", ".join(describe(kind) for kind in kinds)
    if (of := entry(only)) is not None:
        return "table of tables" if is_table(of) else f"table of {describe(of)}"
    return "table" if is_table(only) else getattr(only, "__name__", str(only)).lower()


def categories(cls: type) -> Mapping[str, str]:
    """Keys of a table that pick components -> category."""
    return {name: field.key.component for name, field in fields_of(cls).items() if field.key.component}


def option_class(catalog: Catalog, cls: type, name: str) -> type | None:
    """The options class of component `name` of any category that table `cls` picks from, or None.

    A component without options answers with `NoKeys`. Raises PluginError if its plugin is broken.
    """
    for category in categories(cls).values():
        if name in catalog.component_names(category) or "/" in name:
            try:
                component = catalog.component(category, name)
            except KeyError:
                continue
            return catalog.options(component) or NoKeys
    return None


def type_at(catalog: Catalog, parts: Parts) -> Any | None:
    """The type of the value at a path, or None where nothing is known."""
    try:
        current: Any = catalog.table(parts[0]) or NoKeys
        for part in parts[1:]:
            current = next(
                (found for member in members(current) if (found := _step(catalog, member, part)) is not None),
                None,
            )
            if current is None:
                return None
    except (KeyError, PluginError):
        return None
    return current


def _step(catalog: Catalog, annotation: Any, part: str) -> Any | None:
    if is_table(annotation):
        field = fields_of(annotation).get(part)
        return field.type if field is not None else option_class(catalog, annotation, part)
    if part.isdecimal():
        kinds: Sequence[Any] | None = tuple_types(annotation)
        if kinds is not None:
            return kinds[0] if kinds[-1] is ... else kinds[int(part)] if int(part) < len(kinds) else None
        if (of := element(annotation)) is not None:
            return of
    return entry(annotation)


def default_at(catalog: Catalog, parts: Parts) -> Any:
    """The default of the key at a path as TOML would hold it, or None (error path and flags only)."""
    owner = type_at(catalog, parts[:-1]) if len(parts) > 1 else None
    for member in members(owner):
        field = fields_of(member).get(parts[-1]) if is_table(member) else None
        if field is not None and not field.required:
            return plain(field.default())
    return None


def plain(value: Any) -> Any:
    """A structured value as TOML would hold it; keys that are None are left out."""
    if attrs.has(type(value)):
        return {
            name: plain(inner)
            for name in fields_of(type(value))
            if (inner := getattr(value, name)) is not None
        }
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    return value
