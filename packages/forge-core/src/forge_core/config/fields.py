"""How a table is written: an attrs class whose keys carry their help, bounds and choices.

The metadata drives everything that is derived from a table: conversion, bounds, `forge config reference`,
the JSON Schema and the suggestions in error messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, dataclass_transform

import attrs

C = TypeVar("C", bound=type)
T = TypeVar("T")
METADATA = "forge"


@attrs.frozen(kw_only=True)
class Key:
    """What is known of one key besides its type and default.

    Attributes:
        help: one sentence for the reference.
        ge, gt, le, lt: inclusive and exclusive bounds of a number (or of each number of a list).
        choices: the allowed values of a closed set.
        component: category of components this key picks from by name; their options live in sub-tables
            of the same table, named as the component.
        derived: in words, what the value becomes when it is left out (the default is then None).
        unit: unit of the number ("s", "tokens", ...), or "".
        instead_of: keys of the same table that say the same in another way. Where a later layer gives one
            side and earlier layers the other, the later one wins and the other is dropped; that both stand in
            one layer is for the problems of the table or of its plugin.
        computes: whether it says what a model computes, so that training which goes on with another value
            would train another model; None: as its table says.
    """

    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[Any, ...] | None = None
    component: str | None = None
    derived: str = ""
    unit: str = ""
    instead_of: tuple[str, ...] = ()
    computes: bool | None = None


def key(
    default: Any = attrs.NOTHING,
    *,
    help: str,
    factory: Callable[[], Any] | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: Sequence[Any] | None = None,
    component: str | None = None,
    derived: str = "",
    unit: str = "",
    instead_of: Sequence[str] = (),
    computes: bool | None = None,
) -> Any:
    """Declare one key of a table. See `Key` for the arguments; no default makes the key required."""
    meta = Key(
        help=help,
        ge=ge,
        gt=gt,
        le=le,
        lt=lt,
        choices=None if choices is None else tuple(choices),
        component=component,
        derived=derived,
        unit=unit,
        instead_of=tuple(instead_of),
        computes=computes,
    )
    if factory is not None:
        return attrs.field(factory=factory, metadata={METADATA: meta})
    return attrs.field(default=default, metadata={METADATA: meta})


@dataclass_transform(frozen_default=True, kw_only_default=True)
def table(cls: C) -> C:
    """Make an attrs class for a TOML table: frozen, keyword-only. The class docstring is its help.

    Optional methods; the first two take part in loading:
        `resolve(self, config) -> Self`: fill keys left out (None) once all layers are merged.
        `problems(self) -> Iterable[Problem]`: what does not go together inside the table; paths are
        relative to it.
        `for_one_process(self) -> Self`: the same with every mesh axis of size 1, to use a model of many ranks
        on one.
        `computed(self, config) -> Mapping[str, Any]`: by dotted path, what a model computes with that shapes
        of its tensors do not show; what differs from a folder of weights is told when a run starts from it.

    A table whose keys say what a model computes has `computes: ClassVar[bool] = True`, and declares those
    that do not (kernels, initial values, what only training knows) with `key(..., computes=False)`. Tables
    within it and the options of components that it picks count as the key that holds or picks them.
    """
    return attrs.frozen(kw_only=True, slots=True)(cls)


def evolve(instance: T, **changes: Any) -> T:
    """A copy of a table with some keys changed."""
    changed: T = attrs.evolve(instance, **changes)  # type: ignore[misc]
    return changed


def key_of(attribute: attrs.Attribute[Any]) -> Key:
    """The metadata of one attribute of a table."""
    meta: Key | None = attribute.metadata.get(METADATA)
    if meta is None:
        raise TypeError(f"{attribute.name} is not declared with forge_core.config.key()")
    return meta
