"""Which keys of a configuration say what a model computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forge_core.config.paths import Parts, dotted
from forge_core.config.shape import fields_of, is_table, plain
from forge_core.config.structure import picked

if TYPE_CHECKING:
    from forge_core.config.config import Config

FLAG = "computes"


def model_keys(config: Config) -> Mapping[Parts, Any]:
    """Paths of the keys that say what the model computes, and their defaults as TOML would hold them.

    A key counts where its declaration, or else its table, or else the table around that, says `computes`; the
    options of a component count as the key that picks it does. Components that are not picked do not count.
    """
    found: dict[Parts, Any] = {}
    for name, table in config.tables.items():
        _gather(config, table, (name,), False, found)
    return found


def _gather(config: Config, table: Any, at: Parts, counts: bool, found: dict[Parts, Any]) -> None:
    own = getattr(type(table), FLAG, None)
    counts = own if isinstance(own, bool) else counts
    keys: dict[str, bool] = {}
    for name, field in fields_of(type(table)).items():
        value = getattr(table, name)
        keys[name] = counts if field.key.computes is None else field.key.computes
        if is_table(type(value)):
            _gather(config, value, (*at, name), keys[name], found)
        elif keys[name]:
            found[(*at, name)] = None if field.required else plain(field.default())
    for pick in picked(table, dotted(at)):
        options = config._options.get((pick.table, pick.name))
        if options is not None:
            _gather(config, options, (*at, pick.name), keys[pick.key], found)
