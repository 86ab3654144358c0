"""JSON Schema of a configuration (draft 2020-12), so that editors complete and check TOML files."""

from __future__ import annotations

import inspect
import pathlib
import typing
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from forge_core.config.fields import Key
from forge_core.config.files import DERIVED_KEYS, EXTENDS
from forge_core.config.shape import (
    Field,
    NoKeys,
    categories,
    element,
    entry,
    fields_of,
    is_literal,
    is_optional,
    is_table,
    members,
    plain,
    tuple_types,
)
from forge_core.errors import PluginError

if TYPE_CHECKING:
    from forge_core.config.catalog import Catalog

Schema = dict[str, Any]
_AROUND: ContextVar[tuple[type, ...]] = ContextVar("around", default=())
"""Options that are being described: those that pick from their own category are not entered in themselves."""
_PART = r"^[^/]+/[^/]+$"
_SCALARS: Mapping[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    pathlib.Path: {"type": "string"},
}


def json_schema(catalog: Catalog, names: Sequence[str] | None = None) -> Schema:
    """The schema of all tables, or of those named. Plugins' tables may also be true or false."""
    from forge_core.config.tables import CORE_TABLES

    strings: Schema = {"type": "array", "items": {"type": "string"}}
    properties: Schema = {
        EXTENDS: {
            "description": "File or recipe this one builds on, or several.",
            "anyOf": [{"type": "string"}, strings],
        },
        DERIVED_KEYS: {"description": "Keys of a resolved file that follow from the others.", **strings},
    }
    for name in catalog.table_names() if names is None else names:
        try:
            schema = table_schema(catalog, catalog.table(name) or NoKeys)
        except PluginError:
            schema = {"type": "object"}
        if name not in CORE_TABLES:
            schema = {"description": schema.get("description", ""), "anyOf": [schema, {"type": "boolean"}]}
        properties[name] = schema
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Forge configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def table_schema(catalog: Catalog, cls: type) -> Schema:
    """The schema of one table with its keys and the options of the components it picks from."""
    fields = fields_of(cls)
    schema: Schema = {
        "type": "object",
        "description": inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0],
        "additionalProperties": False,
        "properties": {name: _field(catalog, field) for name, field in fields.items()},
    }
    required = [name for name, field in fields.items() if field.required]
    if required:
        schema["required"] = required
    for category in categories(cls).values():
        schema["patternProperties"] = {_PART: {"type": "object"}}
        for name in catalog.component_names(category):
            if name not in fields:
                schema["properties"][name] = _options(catalog, category, name)
    return schema


def _options(catalog: Catalog, category: str, name: str) -> Schema:
    try:
        options = catalog.options(catalog.component(category, name))
    except PluginError:
        return {"type": "object"}
    around = _AROUND.get()
    if options in around:
        return {"type": "object"}
    token = _AROUND.set((*around, options or NoKeys))
    try:
        return table_schema(catalog, options or NoKeys)
    finally:
        _AROUND.reset(token)


def _field(catalog: Catalog, field: Field) -> Schema:
    key = field.key
    schema = _typed(catalog, field.type, key)
    schema["description"] = key.help + (f" Left out: {key.derived}." if key.derived else "")
    default = None if field.required else field.default()
    if default is not None and not is_table(type(default)):
        schema["default"] = plain(default)
    return schema


def _typed(catalog: Catalog, annotation: Any, key: Key) -> Schema:
    kinds = [_one(catalog, kind, key) for kind in members(annotation)]
    if is_optional(annotation):
        tables = any(is_table(kind) for kind in members(annotation))
        kinds.append({"const": False} if tables else {"enum": ["none", "null"]})
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _one(catalog: Catalog, kind: Any, key: Key) -> Schema:
    if kind in _SCALARS:
        return {**_SCALARS[kind], **_limits(catalog, kind, key)}
    if is_table(kind):
        return table_schema(catalog, kind)
    if is_literal(kind):
        return {"enum": list(typing.get_args(kind))}
    if (of := element(kind)) is not None:
        return {"type": "array", "items": _typed(catalog, of, key)}
    if (kinds := tuple_types(kind)) is not None:
        if kinds[-1] is ...:
            return {"type": "array", "items": _typed(catalog, kinds[0], key)}
        items = [_typed(catalog, inner, key) for inner in kinds]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if (of := entry(kind)) is not None:
        return {"type": "object", "additionalProperties": _typed(catalog, of, key)}
    return {}


def _limits(catalog: Catalog, kind: Any, key: Key) -> Schema:
    """Bounds, choices and component names of a single value."""
    if key.choices is not None:
        return {"enum": list(key.choices)}
    if kind is str and key.component is not None:
        return {"anyOf": [{"enum": list(catalog.component_names(key.component))}, {"pattern": _PART}]}
    if kind is bool or kind not in (int, float):
        return {}
    names = {"minimum": key.ge, "exclusiveMinimum": key.gt, "maximum": key.le, "exclusiveMaximum": key.lt}
    return {name: limit for name, limit in names.items() if limit is not None}
