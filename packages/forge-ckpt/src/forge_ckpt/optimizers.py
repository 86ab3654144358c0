"""Optimizers put back into the state of a checkpoint, or into the part of it that they have a use for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from forge_ckpt.errors import CheckpointError
from forge_ckpt.gathering import NUMBERS, parameter_names
from forge_ckpt.reading import SavedCheckpoint, load_into
from forge_ckpt.tree import join
from forge_core.data.wording import counted
from forge_core.optim.build import CONFIGURED_KEYS, init_state

if TYPE_CHECKING:
    from forge_core.contract import NamedOptimizer
    from forge_core.loop.session import TrainingSession

Entries = dict[str, dict[str, str]]
"""Parameter -> key of its state (`KEY#int` for a number) -> name in the index."""


@attrs.frozen
class Fit:
    """What an optimizer of another kind makes of saved state.

    Attributes:
        kept: parameters whose state has the keys that the optimizer here gives it.
        dropped: parameters whose state has others, so that theirs starts afresh.
        keys: of the state that is dropped.
    """

    kept: set[str]
    dropped: set[str]
    keys: set[str]

    def __str__(self) -> str:
        if not self.dropped:
            return f"the state of every parameter is kept ({len(self.kept)})"
        words = f"{', '.join(sorted(self.keys))} of {counted(len(self.dropped), 'parameter')}"
        return f"{words} is of no use, and starts afresh; the state of {len(self.kept)} is kept"


def fit(session: TrainingSession, saved: SavedCheckpoint) -> Fit:
    """Which saved state the optimizers here would keep if it came from optimizers of another kind."""
    names = parameter_names(session)
    found = Fit(set(), set(), set())
    there_are = {rest.partition("/")[0] for rest in saved.index.names("optimizer/")}
    for name in there_are - set(session.optimizers):
        for parameter, entry in _saved_entries(saved, name).items():
            found.dropped.add(parameter)
            found.keys.update(key.partition("#")[0] for key in entry)
    for name, named in session.optimizers.items():
        entries = _saved_entries(saved, name)
        for group in named.optimizer.param_groups:
            states = [set(named.optimizer.state.get(p, ())) for p in group["params"]]
            usual = next((keys for keys in states if keys), set())  # one that is frozen has none yet
            for p, keys in zip(group["params"], states, strict=True):
                entry = entries.pop(names[id(p)], {})
                there = {key.partition("#")[0] for key in entry}
                if there and there == (keys or usual):
                    found.kept.add(names[id(p)])
                elif there:
                    found.dropped.add(names[id(p)])
                    found.keys.update(there)
    return found


def load_optimizers(
    session: TrainingSession,
    saved: SavedCheckpoint,
    groups: Mapping[str, Any],
    *,
    changed: bool = False,
    lenient: bool = False,
    told: bool = False,
) -> list[str]:
    """Load the state of every optimizer: moments bit for bit, in the dtype they were saved in.

    A parameter without saved state starts fresh.

    Args:
        groups: what evolved in parameter groups, by optimizer.
        changed: it was saved by optimizers of another kind: only state with the same keys is taken, and what
            evolved in groups is not.
        lenient: state that lacks a key is dropped, and a group that has no saved one starts afresh.
        told: keys of [optimizer] that changed are known to the user, and groups need not say so again.

    Returns:
        Notices.

    Raises:
        CheckpointError: an entry is there by half, or an optimizer has other groups.
    """
    notices: list[str] = []
    unfit: set[str] = set()
    if changed:
        found = fit(session, saved)
        unfit, lenient = found.dropped, True
        notices.append(f"another optimizer: {found}")
    targets: dict[str, Tensor] = {}
    finish = []
    for name, named in session.optimizers.items():
        entries = {p: entry for p, entry in _saved_entries(saved, name).items() if p not in unfit}
        numbers = _prepare_state(session, saved, name, named, entries, targets, notices, lenient)
        finish.append((named, numbers))
        if not changed:
            evolved, configured = _load_groups(named, groups.get(name, []), name, lenient)
            notices += evolved if told else [*evolved, *configured]
    load_into(saved, targets)
    for named, numbers in finish:
        for state, key, kind, tensor in numbers:
            state[key] = NUMBERS[kind][0](tensor.item())
        init_state(named.optimizer)
    return notices


def _saved_entries(saved: SavedCheckpoint, optimizer: str) -> Entries:
    found: Entries = {}
    prefix = f"optimizer/{optimizer}/"
    for rest in saved.index.names(prefix):
        parameter, _, key = rest.rpartition("/")
        found.setdefault(parameter, {})[key] = prefix + rest
    return found


def _prepare_state(
    session: TrainingSession,
    saved: SavedCheckpoint,
    name: str,
    named: NamedOptimizer,
    entries: Entries,
    targets: dict[str, Tensor],
    notices: list[str],
    lenient: bool,
) -> list[tuple[dict[str, Any], str, str, Tensor]]:
    """Make room for each saved tensor and note it in `targets`; returns numbers to set once they are read."""
    optimizer, numbers = named.optimizer, []
    names = parameter_names(session)
    told_dtype = False
    for parameter, group in _parameters(optimizer):
        entry = entries.get(names[id(parameter)], {})
        fresh = optimizer.state.pop(parameter, {})
        if not entry:
            continue
        if missing := sorted(set(fresh) - {key.partition("#")[0] for key in entry}):
            what = f"optimizer {name}: the saved state of {names[id(parameter)]} lacks {', '.join(missing)}"
            if not lenient:
                raise CheckpointError(what, 'start it afresh: checkpoint.allow_changed = ["optimizer"]')
            notices.append(f"{what} and starts afresh")
            continue
        state: dict[str, Any] = {}
        for key, stored in entry.items():
            bare, _, kind = key.partition("#")
            info = saved.index.tensors[stored]
            if kind:
                targets[stored] = torch.empty(info.shape, dtype=info.dtype)
                numbers.append((state, bare, kind, targets[stored]))
                continue
            state[bare] = targets[stored] = _room(fresh.get(bare), parameter, info, group)
            if state[bare].dtype != info.dtype and not told_dtype:
                notices.append(f"{stored} was saved as {info.dtype} and is now {state[bare].dtype}")
                told_dtype = True
        optimizer.state[parameter] = state
    return numbers


def _room(fresh: Any, parameter: Tensor, info: Any, group: Mapping[str, Any]) -> Tensor:
    """A tensor to load into: the fresh one where it fits, else one laid out like the parameter."""
    if isinstance(fresh, Tensor) and tuple(fresh.shape) == info.shape:
        return fresh
    if tuple(parameter.shape) == info.shape:
        return torch.empty_like(parameter, dtype=info.dtype, requires_grad=False)
    on_device = len(info.shape) > 0 or group.get("fused") or group.get("capturable")
    return torch.empty(info.shape, dtype=info.dtype, device=parameter.device if on_device else "cpu")


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, group


def _load_groups(
    named: NamedOptimizer, saved: list[dict[str, Any]], name: str, lenient: bool
) -> tuple[list[str], list[str]]:
    """Set what evolved in each group; configured values stay as they are here.

    Returns:
        Notices of groups that start afresh, and of configured values that changed.
    """
    notices: list[str] = []
    configured: list[str] = []
    for group in named.optimizer.param_groups:
        entry = _group_of(group, saved)
        if entry is None:
            what = f"optimizer {name}: none of the saved parameter groups belongs to {group.get('name')!r}"
            if not lenient:
                hint = 'restore [optimizer], or let it start afresh: checkpoint.allow_changed = ["optimizer"]'
                raise CheckpointError(what, hint)
            notices.append(f"{what}, which starts afresh")
            continue
        group.update(join(entry["values"], {}))
        for key in CONFIGURED_KEYS:
            was = entry.get("configured", {}).get(key)
            if was is not None and was != group.get(key):
                configured.append(
                    f"optimizer {name}, group {group.get('name')}: {key} was {was:g}, is now {group[key]:g}"
                )
    return notices, configured


def _group_of(group: Mapping[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The saved group of the same name, else the one that shares a parameter, else any if all are alike."""
    named = [entry for entry in saved if entry["name"] == group.get("name")]
    if len(named) == 1:
        return named[0]
    own = set(group.get("param_names", ()))
    for entry in saved:
        if own & set(entry.get("param_names", ())):
            return entry
    alike = all(entry["values"] == saved[0]["values"] for entry in saved)
    return saved[0] if saved and alike else None
