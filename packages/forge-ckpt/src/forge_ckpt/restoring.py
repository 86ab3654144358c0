"""A model put back into the state of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from forge_ckpt.errors import RefusedError
from forge_ckpt.gathering import persistent_buffers, saved_parameters
from forge_ckpt.reading import SavedCheckpoint, load_into
from forge_core.data.wording import counted
from forge_core.errors import Problem

if TYPE_CHECKING:
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
        total = counted(len(self.loaded) + len(self.kept), "tensor")
        parts = [f"{len(self.loaded):,} of {total} loaded"]
        if self.kept:
            words = "keeps its initial value" if len(self.kept) == 1 else "keep their initial values"
            parts.append(f"{_some(self.kept)} {words}")
        if self.unused:
            verb = "is" if len(self.unused) == 1 else "are"
            parts.append(f"{_some(self.unused)} in the checkpoint {verb} not used")
        return "; ".join(parts)


def load_model(
    session: TrainingSession, saved: SavedCheckpoint, matches: Any = None, partial: bool = False
) -> Coverage:
    """Load parameters and persistent buffers. Arguments and errors are those of `compare_model`."""
    coverage = compare_model(session, saved, matches, partial)
    here = _tensors(session)
    load_into(saved, {f"model/{name}": here[name].detach() for name in coverage.loaded})
    return coverage


def _tensors(session: TrainingSession) -> dict[str, Tensor]:
    return {**saved_parameters(session), **persistent_buffers(session)}


def compare_model(
    session: TrainingSession, saved: SavedCheckpoint, matches: Any = None, partial: bool = False
) -> Coverage:
    """What `load_model` would load; reads nothing yet.

    Args:
        matches: `f(name) -> bool`, which parameters and persistent buffers to load; by default all.
        partial: what the checkpoint lacks keeps its initial values; what it has too much is passed over.

    Raises:
        RefusedError: names are missing or too many, or shapes differ; the first ones are named.
    """
    here = _tensors(session)
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
    return coverage


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
