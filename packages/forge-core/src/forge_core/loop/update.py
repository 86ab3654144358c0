"""The end of every step: one norm, clip, guard, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from forge_core.config.tables import TrainConfig
from forge_core.loop.clip import clip_
from forge_core.optim import guarded_step

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession


@attrs.frozen
class Update:
    """What an update did; all on the device, the same on every rank.

    Attributes:
        grad_norm: () global norm before clipping. ok: () bool, whether the update happened.
        loss: () what was judged. sums: the further sums, over all ranks.
    """

    grad_norm: Tensor
    ok: Tensor
    loss: Tensor
    sums: Sequence[Tensor] = ()


def apply_update(
    session: TrainingSession, loss: Tensor, *, optimizer: str = "main", sums: Sequence[Tensor] = ()
) -> Update:
    """Clip by the global norm, let the guard judge, step `optimizer` with the rate of this update, drop
    gradients.

    Every rank calls it at the same point of a step.

    Args:
        loss: () this rank's part of the step's loss, which is what all data ranks' parts add up to (losses
            divided by global counts do); a sum that is not finite skips the update.
        optimizer: name of the optimizer that owns the gradients.
        sums: () further parts that are to be added up over ranks on the way.

    Parameters and optimizer state stay bit-equal when the guard says no.
    """
    named = session.optimizers[optimizer]
    groups = named.optimizer.param_groups
    parameters = [p for group in groups for p in group["params"] if p.grad is not None]
    if session.scaler is not None:
        session.scaler.unscale_([p.grad for p in parameters])
    norm, (loss, *sums) = session.global_norm(parameters, (loss, *sums), holders=session.mesh.loss_copies)
    grads = [p.grad for p in parameters]
    if session.events["gradients_ready"]:
        session.emit("gradients_ready", session.step + 1)
    limit = session.config[TrainConfig].grad_clip_norm
    if limit > 0:
        clip_(grads, norm, limit)
    factor = named.schedule(session.step + 1)
    for group in groups:
        group["lr"] = group["initial_lr"] * factor
    ok = session.guard.judge(loss, norm)
    if session.scaler is not None:
        session.scaler.update(torch.isfinite(norm))
    if session.checkpointer is not None:
        session.checkpointer.staged()
    guarded_step(named.optimizer, ok)
    drop_gradients(named.optimizer)
    return Update(norm, ok, loss, sums)


def skip_update(session: TrainingSession, loss: Tensor, *, optimizer: str = "main") -> Update:
    """Drop the gradients of a step that has nothing to learn from (no supervised token on any rank)."""
    if session.checkpointer is not None:
        session.checkpointer.staged()  # what runs after an update, skipped ones too, may change parameters
    drop_gradients(session.optimizers[optimizer].optimizer)
    return Update(torch.zeros_like(loss), torch.zeros((), dtype=torch.bool, device=loss.device), loss)


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Let go of all gradients, without the profiler range of `zero_grad`, which a small step feels."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
