"""Sizes of mesh axes and coordinates of ranks: arithmetic only, so that `forge check` can ask without
torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from forge_core.contract.parts import MeshAxis
from forge_core.errors import ConfigError, Problem

FILLS = -1
"""Size of an axis that takes the ranks that the others leave."""


def ordered(axes: Sequence[MeshAxis]) -> list[MeshAxis]:
    """Axes that multiply to the number of processes, outermost first."""
    return sorted((axis for axis in axes if axis.carved_from is None), key=lambda axis: axis.place)


def carved(axes: Sequence[MeshAxis], parent: str | None = None) -> list[MeshAxis]:
    """Axes of more than one rank that regroup the ranks of another (of `parent`), outermost first."""
    found = [a for a in axes if a.carved_from is not None and a.size > 1]
    return sorted((a for a in found if parent in (None, a.carved_from)), key=lambda axis: axis.place)


def needed_processes(axes: Sequence[MeshAxis]) -> int:
    """The fewest processes that the axes can run on."""
    filling = [axis.name for axis in ordered(axes) if axis.size == FILLS]
    regrouped = (math.prod(axis.size for axis in carved(axes, name)) for name in filling)
    return fixed_processes(axes) * math.prod(regrouped)


def fixed_processes(axes: Sequence[MeshAxis]) -> int:
    """The product of the sizes that are given, of which the number of processes is a multiple."""
    return math.prod(max(axis.size, 1) for axis in ordered(axes))


def mesh_problems(axes: Sequence[MeshAxis], world_size: int) -> list[Problem]:
    """Why the axes do not fit `world_size` processes; empty if they do."""
    if any(axis.size != FILLS and axis.size < 1 for axis in axes):
        bad = next(axis for axis in axes if axis.size != FILLS and axis.size < 1)
        return [Problem("distributed", f"axis {bad.name} has size {bad.size}", "at least 1")]
    plain = ordered(axes)
    filling = [axis.name for axis in plain if axis.size == FILLS]
    if len(filling) > 1:
        return [Problem("distributed", f"{' and '.join(filling)} both take what is left", "give a size")]
    fixed = fixed_processes(axes)
    left, rest = divmod(world_size, fixed)
    if rest or (left != 1 and not filling):
        sizes = [f"{axis.name} {axis.size}" for axis in plain if axis.size > 1]
        asked, count = " x ".join(sizes) or "1", "process" if world_size == 1 else "processes"
        start = f"start {'a multiple of ' if filling else ''}{fixed}"
        hint = f"{start}, on one machine with --nproc {fixed}, or change the sizes"
        message = f"the mesh is {asked}, but there {'is' if world_size == 1 else 'are'} {world_size} {count}"
        return [Problem("distributed", message, hint)]
    needed = needed_processes(axes) if filling else 0
    return _carving_problems(axes, {a.name: left if a.size == FILLS else a.size for a in plain}, needed)


def _carving_problems(axes: Sequence[MeshAxis], sizes: dict[str, int], needed: int) -> list[Problem]:
    """Args: sizes: of the axes, by name. needed: the fewest processes; 0 where more of them are no help."""
    problems = []
    way = f"start a multiple of {needed}, on one machine with --nproc {needed}, or " if needed else ""
    for parent in dict.fromkeys(a.carved_from for a in carved(axes) if a.carved_from is not None):
        product = math.prod(axis.size for axis in carved(axes, parent))
        names = " x ".join(f"{axis.name} {axis.size}" for axis in carved(axes, parent))
        if parent not in sizes:
            message = f"{names} regroups the axis {parent}, which does not exist"
            problems.append(Problem("distributed", message, f"axes: {', '.join(sizes)}"))
        elif sizes[parent] % product:
            ranks = f"{sizes[parent]} rank{'s' * (sizes[parent] != 1)}"
            message = f"{names} regroups the {ranks} of {parent}, which it does not divide"
            problems.append(Problem("distributed", message, f"{way}change the sizes"))
    return problems


def resolve_axes(axes: Sequence[MeshAxis], world_size: int) -> tuple[MeshAxis, ...]:
    """The axes in mesh order with every size known, carved ones last.

    Raises:
        ConfigError: they do not multiply to the number of processes.
    """
    problems = mesh_problems(axes, world_size)
    if problems:
        raise ConfigError(problems)
    left = world_size // fixed_processes(axes)
    full = [attrs.evolve(a, size=left) if a.size == FILLS else a for a in ordered(axes)]
    return (*full, *carved(axes))


def fitting_axes(axes: Sequence[MeshAxis], world_size: int) -> tuple[MeshAxis, ...]:
    """What `resolve_axes` gives; nothing where the axes do not fit."""
    return () if mesh_problems(axes, world_size) else resolve_axes(axes, world_size)


def coordinates(sizes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Where `rank` lies in a row-major grid."""
    found: list[int] = []
    for size in reversed(sizes):
        rank, place = divmod(rank, size)
        found.append(place)
    return tuple(reversed(found))


def flat_index(sizes: Sequence[int], place: Sequence[int]) -> int:
    """The inverse of `coordinates`."""
    index = 0
    for size, coordinate in zip(sizes, place, strict=True):
        index = index * size + coordinate
    return index


def data_ranks(axes: Sequence[MeshAxis]) -> int:
    """Ranks that read different samples, of axes whose sizes are known."""
    return math.prod(axis.size for axis in ordered(axes) if axis.data_differs)
