"""The core's step function: accumulate gradients over micro-batches, equal to one big batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_core.contract import Batch, StepResult
from forge_core.loop.update import apply_update, skip_update

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`, copied without blocking."""
    if device.type == "cpu":
        return batch
    return {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}


def count_step(session: TrainingSession, batches: Iterable[Batch]) -> dict[str, int]:
    """Global counts of a step: what its losses are divided by, summed over micro-batches and ranks."""
    totals: dict[str, int] = {}
    for batch in batches:
        for name, value in session.forward.count(batch).items():
            totals[name] = totals.get(name, 0) + value
    return totals


class AccumulateStep:
    """Each micro-batch adds the gradient of its summed loss over the global count of supervised tokens."""

    def train(self, session: TrainingSession, step: int) -> StepResult:
        """One update from `grad_accum_steps` micro-batches. A step without a supervised token changes
        nothing."""
        batches = session.stream.take(session.grad_accum_steps)
        counts = count_step(session, batches)
        tokens = counts["tokens"]
        scale = 1.0 / max(tokens, 1)
        session.attached.begin_step(counts)
        loss: Tensor | None = None
        objective: Tensor | None = None
        sums: dict[str, Tensor] = {}
        positions = 0
        with session.attached.activate():
            for batch in batches:
                positions += batch["tokens"].numel()
                part, total = self._micro_batch(
                    session, to_device(batch, session.device), counts, scale, sums
                )
                loss = part if loss is None else loss + part
                objective = total if objective is None else objective + total
        assert loss is not None, "a step takes at least one micro-batch"
        assert objective is not None
        loss = loss * scale
        for name, value in session.attached.totals().items():
            sums[name] = value
            objective = objective + value
        update = apply_update(session, objective) if tokens else skip_update(session, loss)
        return StepResult(
            loss=loss,
            objective=objective,
            grad_norm=update.grad_norm,
            ok=update.ok,
            tokens=positions * session.ranks.data_size,
            counts=counts,
            sums=sums,
        )

    def _micro_batch(
        self,
        session: TrainingSession,
        batch: Batch,
        counts: Mapping[str, int],
        scale: float,
        sums: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward; the summed cross-entropy and the scaled objective, without a graph."""
        output = session.forward(session.model, batch)
        total = output.loss_sum * scale
        for term in session.loss_terms:
            value = term.term(session.model, batch, output) * (term.weight / max(counts[term.per], 1))
            key = f"loss/{term.name}"
            sums[key] = sums[key] + value.detach() if key in sums else value.detach()
            total = total + value
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
        return output.token_loss.sum(), total.detach()

    def evaluate(self, session: TrainingSession, batches: Iterable[Batch]) -> dict[str, float]:
        """Sum of token losses and count of supervised tokens; one read-back at the end."""
        total = torch.zeros((), dtype=torch.float64, device=session.device)
        tokens = 0
        for batch in batches:
            tokens += session.forward.count(batch)["tokens"]
            total += session.forward(session.model, to_device(batch, session.device)).token_loss.sum()
            if session.stop:
                break
        return {"loss_sum": float(total), "tokens": float(tokens)}


def text_step(session: TrainingSession, step: int) -> StepResult:
    """The core's step as a function: one accumulated update, see `AccumulateStep.train`."""
    return AccumulateStep().train(session, step)
