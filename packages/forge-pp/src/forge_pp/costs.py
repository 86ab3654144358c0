"""What a block costs, so that stages can share evenly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from forge_core.errors import ConfigError, Problem
from forge_core.loop.flops import flops_of
from forge_core.model.roles import role_of
from forge_pp.cut import even_cuts
from forge_pp.parts import Cut, spec_of
from forge_pp.table import PpConfig, stages_per_rank

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

MATRICES = ("matrix", "matrices", "head")


def work(module: nn.Module, share: float = 1.0) -> float:
    """FLOPs of a token in the matrices of a module, forward alone.

    A module that uses a share of its parameters for each token (experts), or that a share of the tokens
    passes, says which as `active_share`; `share` is that of what it stands in.
    """
    share *= float(getattr(module, "active_share", 1.0))
    linear = isinstance(module, nn.Linear)
    mine = module.named_parameters(recurse=False)
    total = sum(2.0 * share * p.numel() for name, p in mine if linear or role_of(module, name) in MATRICES)
    return total + sum(work(child, share) for child in module.children())


def size(module: nn.Module) -> float:
    """Parameters of a module."""
    return float(sum(parameter.numel() for parameter in module.parameters()))


def find_cut(session: TrainingSession, model: nn.Module) -> Cut:
    """Where the model is cut, as `[pp]` says.

    Raises:
        ConfigError: a name is no block, or they are not in order.
    """
    pp, spec = session.config[PpConfig], spec_of(model)
    stages = pp.size * stages_per_rank(pp)
    blocks = list(model.get_submodule(spec.blocks).named_children())
    names = [name for name, _ in blocks]
    if pp.split:
        return Cut((0, *_stated(pp.split, names)), tuple(names))
    groups = _groups(names)
    if stages > len(groups):
        raise ConfigError([Problem("pp.size", f"{stages} stages are more than {len(groups)} layers")])
    measure = work if pp.balance == "flops" else size
    costs = dict(zip(names, (measure(block) for _, block in blocks), strict=True))
    first, last = (sum(measure(model.get_submodule(n)) for n in part) for part in (spec.entry, spec.exit))
    if pp.balance == "flops":
        told = flops_of(session)
        rest = (0.0 if told is None else told.expected) / 3 - sum(costs.values()) - first - last
        costs = {name: cost + max(rest, 0.0) / len(costs) for name, cost in costs.items()}
    begins = even_cuts([sum(costs[n] for n in group) for group in groups], stages, first, last)
    return Cut((0, *(names.index(groups[begin][0]) for begin in begins)), tuple(names))


def _groups(names: list[str]) -> list[list[str]]:
    """Blocks with those inserted after them, which a cut does not part."""
    groups: list[list[str]] = []
    for name in names:
        if name.isdecimal() or not groups:
            groups.append([])
        groups[-1].append(name)
    return groups


def _stated(split: list[str], names: list[str]) -> list[int]:
    unknown = [name for name in split if name not in names]
    if unknown:
        known = f"{names[0]} to {names[-1]}"
        raise ConfigError([Problem("pp.split", f"there is no block {unknown[0]!r}", f"blocks: {known}")])
    places = [names.index(name) for name in split]
    if places != sorted(set(places)) or places[0] == 0:
        raise ConfigError(
            [Problem("pp.split", f"{split} do not begin stages in order", "ascending, not the first")]
        )
    return places
