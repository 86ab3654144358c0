"""The top level of a configuration: which tables there are, who owns them, and what is not a table at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_core.config.files import DERIVED_KEYS, EXTENDS
from forge_core.config.layers import Layers
from forge_core.config.leaves import show
from forge_core.config.shape import NoKeys
from forge_core.config.structure import TableReader
from forge_core.config.suggest import did_you_mean, nearest, normal, suggest_key
from forge_core.config.values import BAD
from forge_core.errors import PluginError


def read_tables(reader: TableReader, layers: Layers, core: Mapping[str, type]) -> dict[str, Any]:
    """Structure the core's tables, with defaults where absent, then plugins' that are asked for, by name.

    Problems are left in `reader.problems`.
    """
    given = {name: _as_table(reader, name, value, core) for name, value in layers.tree.items()}
    tables: dict[str, Any] = {}
    for name, cls in core.items():
        # a stand-in catalog may replace a core table's class
        owner = reader.catalog.table(name) if name in reader.catalog.table_names() else cls
        tables[name] = reader.read_table(owner or NoKeys, given.pop(name, None) or {}, (name,))
    for name in sorted(given):
        values = given[name]
        if values is None:
            continue
        try:
            owner = reader.catalog.table(name) or NoKeys
        except KeyError:
            _nobody_owns(reader, name, core)
        except PluginError as error:
            reader.fail((name,), error.message, error.hint)
        else:
            tables[name] = reader.read_table(owner, values, (name,))
    return {name: table for name, table in tables.items() if table is not BAD}


def _as_table(reader: TableReader, name: str, value: Any, core: Mapping[str, type]) -> dict[str, Any] | None:
    """The values of a table; None for one that is turned off or is no table."""
    owned = name in reader.catalog.table_names()
    if isinstance(value, dict):
        return value
    if isinstance(value, bool) and (owned or not value):
        if not value and name in core:
            reader.fail((name,), "a table of the core cannot be turned off", "leave it out for the defaults")
        return {} if value else None
    if owned:
        several = isinstance(value, list) and any(isinstance(inner, dict) for inner in value)
        hint = f"write [{name}], not [[{name}]]" if several else f"write [{name}] and its keys below"
        reader.fail((name,), f"expected a table, not {show(value)}", hint)
    elif value is True and not _places(reader, name):
        return {}
    elif name in (EXTENDS, DERIVED_KEYS):
        reader.fail((name,), "belongs into a file", "give the file that extends as the configuration")
    else:
        near = suggest_key(reader.catalog, (), name, [EXTENDS, DERIVED_KEYS])
        reader.fail(
            (name,), "is not in a table", did_you_mean(near) or "a key belongs under a [table] header"
        )
    return None


def _nobody_owns(reader: TableReader, name: str, core: Mapping[str, type]) -> None:
    names = reader.catalog.table_names()
    near = [f"[{known}]" for known in nearest(name, names)]
    if near:
        reader.fail((name,), f"no installed plugin owns [{name}]", did_you_mean(near))
        return
    key = _places(reader, name)
    plugins = ", ".join(f"[{known}]" for known in sorted(set(names) - set(core)))
    reader.fail(
        (name,),
        f"no installed plugin owns [{name}]",
        did_you_mean([f"[{place}]" for place in key])
        or f"installed plugins own {plugins or 'no tables'}; a table [NAME] belongs to the plugin "
        "of that name: pip install the package that brings it",
    )


def _places(reader: TableReader, name: str) -> list[str]:
    """Where other tables have exactly this key."""
    places = reader.catalog.keys_elsewhere(name)
    return [place for place in places if normal(place.rpartition(".")[2]) == normal(name)]
