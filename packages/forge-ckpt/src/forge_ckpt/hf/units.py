"""Which tensors of a Hugging Face folder make which of ours: rules applied to names. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from forge_ckpt.hf.names import fill, match
from forge_core.contract import TensorRule


@attrs.frozen
class Unit:
    """Tensors that are converted together: all names of one application of a rule."""

    rule: TensorRule
    theirs: tuple[str, ...]
    ours: tuple[str, ...]


@attrs.frozen
class Units:
    """What a set of names comes to.

    Attributes:
        by_ours, by_theirs: the unit that a name belongs to, in the order of the names given.
        unknown: names that no rule has.
    """

    by_ours: dict[str, Unit]
    by_theirs: dict[str, Unit]
    unknown: tuple[str, ...]


def unit_of(rules: Iterable[TensorRule], name: str, *, theirs: bool) -> Unit | None:
    """The unit that a name belongs to, None if no rule has it.

    Args:
        theirs: the name is one of theirs, else one of ours.
    """
    for rule in rules:
        for pattern in rule.theirs if theirs else rule.ours:
            numbers = match(pattern, name)
            if numbers is None:
                continue
            parts = [{**numbers, rule.over: str(i)} for i in range(rule.count)] if rule.over else [numbers]
            if rule.over and int(numbers.get(rule.over, 0)) >= rule.count:
                continue
            return Unit(
                rule,
                tuple(fill(p, part) for p in rule.theirs for part in parts),
                tuple(fill(p, numbers) for p in rule.ours),
            )
    return None


def find_units(
    rules: Sequence[TensorRule], names: Iterable[str], *, theirs: bool, ignored: Sequence[str] = ()
) -> Units:
    """The units of all names.

    Args:
        theirs: the names are theirs, else ours.
        ignored: patterns of names that are left out.
    """
    by_ours: dict[str, Unit] = {}
    by_theirs: dict[str, Unit] = {}
    unknown = []
    for name in names:
        if name in (by_theirs if theirs else by_ours):
            continue
        unit = unit_of(rules, name, theirs=theirs)
        if unit is not None:
            by_ours |= dict.fromkeys(unit.ours, unit)
            by_theirs |= dict.fromkeys(unit.theirs, unit)
        elif not any(match(pattern, name) is not None for pattern in ignored):
            unknown.append(name)
    return Units(by_ours, by_theirs, tuple(unknown))
