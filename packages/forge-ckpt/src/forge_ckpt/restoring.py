"""A session put back into the state of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from forge_ckpt.errors import CheckpointError, RefusedError
from forge_ckpt.gathering import NUMBERS, parameter_names, persistent_buffers, saved_parameters
from forge_ckpt.reading import SavedCheckpoint, load_into
from forge_ckpt.tree import join
from forge_core.errors import Problem
from forge_core.optim.build import CONFIGURED_KEYS, init_state

if TYPE_CHECKING:
    from forge_core.contract import NamedOptimizer
    from forge_core.loop.session import TrainingSession


@attrs.define
class Coverage:
    """What of the model came from a checkpoint.

    Attributes:
        loaded: global names that were loaded.
        kept: names of this model that keep their initial values.
        unused: names in the checkpoint that this model has no use for.
        converted: name -> (dtype saved, dtype here) where they differ.
    """

    loaded: list[str]
    kept: list[str]
    unused: list[str]
    converted: dict[str, tuple[torch.dtype, torch.dtype]]

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} of {len(self.loaded) + len(self.kept)} tensors loaded"]
        if self.kept:
            parts.append(f"{_some(self.kept)} keep their initial values")
        if self.unused:
            parts.append(f"{_some(self.unused)} in the checkpoint are not used")
        return "; ".join(parts)


def load_model(
    session: TrainingSession, saved: SavedCheckpoint, matches: Any = None, partial: bool = False
) -> Coverage:
    """Load parameters and persistent buffers.

    Args:
        matches: `f(name) -> bool`, which of them to load; by default all.
        partial: what the checkpoint lacks keeps its initial values; what it has too much is passed over.

    Raises:
        RefusedError: names are missing or too many, or shapes differ; the first ones are named.
    """
    here: dict[str, Tensor] = {**saved_parameters(session), **persistent_buffers(session)}
    there = set(saved.index.names("model/"))
    elsewhere = set(getattr(session.model, "whole_state", ()))  # where this rank has a part of the model
    wanted = [name for name in here if matches is None or matches(name)]
    coverage = Coverage(
        loaded=[name for name in wanted if name in there],
        kept=[name for name in here if name not in there or name not in wanted],
        unused=sorted(name for name in there if name not in here and name not in elsewhere),
        converted={},
    )
    problems: list[str] = []
    shapes: list[str] = []
    if not partial and matches is None:
        if missing := [name for name in here if name not in there]:
            problems.append(f"the model has {_some(missing)}, which {saved.where} lacks")
        if coverage.unused:
            problems.append(f"{saved.where} has {_some(coverage.unused)}, which the model lacks")
    for name in coverage.loaded:
        info, tensor = saved.index.tensors[f"model/{name}"], here[name]
        if tuple(tensor.shape) != info.shape:
            shapes.append(f"{name} is {tuple(tensor.shape)} here and {info.shape}")
        if tensor.dtype != info.dtype:
            coverage.converted[name] = (info.dtype, tensor.dtype)
    if shapes:
        problems.append(f"{_some(shapes)} in {saved.where}")
    if problems:
        way = "exclude" if shapes else "partial"
        hint = f"restore [model]; a new run takes what fits with checkpoint.start_from and checkpoint.{way}"
        raise RefusedError([Problem("checkpoint", text, hint) for text in problems])
    load_into(saved, {f"model/{name}": here[name].detach() for name in coverage.loaded})
    return coverage


def load_optimizers(session: TrainingSession, saved: SavedCheckpoint, groups: Mapping[str, Any]) -> list[str]:
    """Load the state of every optimizer: moments bit for bit, in the dtype they were saved in.

    A parameter without saved state starts fresh. Returns notices.

    Raises:
        CheckpointError: an entry is there by half, or an optimizer has other groups.
    """
    notices: list[str] = []
    targets: dict[str, Tensor] = {}
    finish = []
    for name, named in session.optimizers.items():
        entries = _saved_entries(saved, name)
        numbers = _prepare_state(session, saved, name, named, entries, targets, notices)
        finish.append((named, numbers))
        notices += _load_groups(named, groups.get(name, []), name)
    load_into(saved, targets)
    for named, numbers in finish:
        for state, key, kind, tensor in numbers:
            state[key] = NUMBERS[kind][0](tensor.item())
        init_state(named.optimizer)
    return notices


Entries = dict[str, dict[str, str]]


def _saved_entries(saved: SavedCheckpoint, optimizer: str) -> Entries:
    """Parameter -> state key -> name in the index."""
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
) -> list[tuple[dict[str, Any], str, str, Tensor]]:
    """Make room for each saved tensor and note it in `targets`; returns numbers to set once they are read."""
    optimizer, numbers = named.optimizer, []
    names = parameter_names(session)
    for parameter, group in _parameters(optimizer):
        entry = entries.get(names[id(parameter)], {})
        fresh = optimizer.state.pop(parameter, {})
        if not entry:
            continue
        if missing := sorted(set(fresh) - {key.partition("#")[0] for key in entry}):
            what = f"optimizer {name}: the saved state of {names[id(parameter)]} lacks {', '.join(missing)}"
            raise CheckpointError(what, "load without it: checkpoint.optimizer = false")
        state: dict[str, Any] = {}
        for key, stored in entry.items():
            bare, _, kind = key.partition("#")
            info = saved.index.tensors[stored]
            if kind:
                targets[stored] = torch.empty(info.shape, dtype=info.dtype)
                numbers.append((state, bare, kind, targets[stored]))
                continue
            state[bare] = targets[stored] = _room(fresh.get(bare), parameter, info, group)
            if state[bare].dtype != info.dtype and not notices:
                notices.append(f"{stored} was saved as {info.dtype} and is now {state[bare].dtype}")
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


def _load_groups(named: NamedOptimizer, saved: list[dict[str, Any]], name: str) -> list[str]:
    """Set what evolved in each group; configured values stay as they are here."""
    notices = []
    for group in named.optimizer.param_groups:
        entry = _group_of(group, saved)
        if entry is None:
            raise CheckpointError(
                f"optimizer {name}: none of the saved parameter groups belongs to {group.get('name')!r}",
                "restore [optimizer], or load without it: checkpoint.optimizer = false",
            )
        group.update(join(entry["values"], {}))
        for key in CONFIGURED_KEYS:
            was = entry.get("configured", {}).get(key)
            if was is not None and was != group.get(key):
                notices.append(
                    f"optimizer {name}, group {group.get('name')}: {key} was {was:g}, is now {group[key]:g}"
                )
    return notices


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


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
