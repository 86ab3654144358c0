"""Whether all ranks are about to run the same thing, found out before the first step."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from forge_core.errors import ForgeError
from forge_core.metrics.writers import flatten
from forge_core.version import __version__

if TYPE_CHECKING:
    from forge_core.distributed.control import Control
    from forge_core.loop.session import TrainingSession

SHOWN = 6
"""Differences that an error lists."""


def compare_settings(session: TrainingSession, control: Control) -> None:
    """Refuse to build where ranks differ in configuration or versions. Called by every rank.

    Raises:
        ForgeError: see `compare`.
    """
    import tomllib

    versions = {"forge": __version__, "torch": torch.__version__, "python": platform.python_version()}
    plugins = {f"plugin {p.name}": p.version for p in session.plugins.loaded.values()}
    tables = flatten(tomllib.loads(session.config.to_toml()))
    compare(control, {**versions, **plugins, **{name: str(value) for name, value in tables}})


def compare_plans(session: TrainingSession, control: Control) -> None:
    """Refuse to run where ranks have built different plans or models. Called by every rank.

    Raises:
        ForgeError: see `compare`.
    """
    if session.mesh.params_differ_size > 1:
        return  # a stage has parts of its own
    plan = [f"{e.hook} of {e.plugin} {e.version}: {e.what}" for e in session.plan.entries]
    shapes = {f"parameter {name}": str(tuple(p.shape)) for name, p in session.freeze.named.items()}
    compare(control, {"plan": plan, **shapes})


def compare(control: Control, mine: Mapping[str, Any]) -> None:
    """Compare facts over all ranks; they travel only where they differ.

    A rank that trained by another plan would wait for collectives that no other rank makes.

    Raises:
        ForgeError: the same on every rank; names what differs, and the ranks.
    """
    text = json.dumps(mine)
    if control.alike(text):
        return
    lines = differences([json.loads(each) for each in control.texts(text)])
    more = f", and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    raise ForgeError(
        f"the ranks are not about to run the same: {'; '.join(lines[:SHOWN])}{more}",
        "start every rank with one configuration and one environment",
    )


def differences(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each fact that is not the same everywhere: `train.seed is 1 on rank 0, 2 on rank 1`."""
    names = list(dict.fromkeys(name for each in found for name in each))
    lines = []
    for name in names:
        values = [each.get(name) for each in found]
        if any(value != values[0] for value in values):
            lines.append(_plan_line(values) if name == "plan" else f"{name} is {_by_rank(values)}")
    return lines


def _by_rank(values: Sequence[Any]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault("missing" if value is None else str(value), []).append(rank)
    return ", ".join(f"{value} on rank {' '.join(map(str, where))}" for value, where in ranks.items())


def _plan_line(plans: Sequence[Any]) -> str:
    length = min(map(len, plans))
    at = next((i for i in range(length) if len({plan[i] for plan in plans}) > 1), length)
    return f"entry {at + 1} of the plan is {_by_rank([p[at] if at < len(p) else None for p in plans])}"
