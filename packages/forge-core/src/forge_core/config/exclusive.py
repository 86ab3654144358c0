"""Keys that say the same in two ways: the later layer's way counts, and the other is dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forge_core.config.layers import Layers
from forge_core.config.paths import Parts
from forge_core.config.shape import fields_of, is_table, members
from forge_core.errors import PluginError

if TYPE_CHECKING:
    from forge_core.config.catalog import Catalog


def drop_replaced(layers: Layers, catalog: Catalog) -> None:
    """Drop what a later layer says in another way (`instead_of` of a key), in all tables that are on.

    What one layer says in both ways, or several layers by turns, stays: it is a problem of the table.
    """
    for name, values in list(layers.tree.items()):
        if isinstance(values, dict):
            try:
                cls = catalog.table(name)
            except (KeyError, PluginError):  # reported where the table is read
                continue
            if cls is not None:
                _drop_in(layers, cls, values, (name,))


def _drop_in(layers: Layers, cls: type, values: Mapping[str, Any], at: Parts) -> None:
    fields = fields_of(cls)
    # all are compared before any is dropped, as if each layer had dropped what it found below it
    dropped: set[Parts] = set()
    for name, field in fields.items():
        for other in field.key.instead_of if values.get(name) not in (None, []) else ():
            one, two = layers.span((*at, name)), layers.span((*at, other))
            if one is not None and two is not None:
                if one[0] > two[1]:
                    dropped.add((*at, other))
                elif two[0] > one[1]:
                    dropped.add((*at, name))
    for parts in dropped:
        layers.drop(parts)
    for name, field in fields.items():
        inner = values.get(name)
        if isinstance(inner, dict):
            for kind in filter(is_table, members(field.type)):
                _drop_in(layers, kind, inner, (*at, name))
