"""The core's step function: accumulate gradients over micro-batches, equal to one big batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from forge_core.contract import Batch, StepResult
from forge_core.loop.update import apply_update, skip_update
from forge_core.model.documents import run_lengths

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`, copied without blocking; what has a shape alone stays so.

    `document_count` is then in it, which only a look at the device could tell later.
    """
    if device.type == "cpu":
        return batch
    there = {k: v for k, v in batch.items() if isinstance(v, Tensor) and not v.is_meta}
    moved: Batch = {k: v.to(device, non_blocking=True) for k, v in there.items()}
    if "documents" in there:
        moved["document_count"] = len(run_lengths(there["documents"]))
    return {**batch, **moved}


def totals_of(session: TrainingSession, batches: Iterable[Batch]) -> dict[str, int]:
    """What `forward.count` gives, summed over micro-batches of this rank."""
    totals: dict[str, int] = {}
    for batch in batches:
        for name, value in session.forward.count(batch).items():
            totals[name] = totals.get(name, 0) + value
    return totals


def count_step(
    session: TrainingSession, batches: Sequence[Batch], totals: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Global counts of a step: what its losses are divided by, summed over micro-batches and ranks.

    Every step function calls it once a step, on every rank, before it runs the model: what plugins do before
    an update (`forge_before_updates`) is done here. On several ranks it makes the step's small reduction on
    the CPU, in which a stop that any rank was asked for travels, too.

    Args:
        totals: what `totals_of` gives, where the batches of this rank do not have all that is counted.
    """
    for before in session.before_updates:
        before(session.step + 1, batches)
    mine = totals_of(session, batches) if totals is None else dict(totals)
    return mine if session.control is None else session.control.counts(mine, session.step + 1)


@contextmanager
def without_trace(session: TrainingSession) -> Iterator[None]:
    """For forwards beside training: no gradients, afterwards the random state that was there before, and no
    gathered weights left over. Modules stay in the mode they are in."""
    devices = [session.device] if session.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            yield
    finally:
        if session.control is not None:
            from forge_core.parallel.sync import reshard  # slow to import, and one process needs none

            reshard(session.model)


def forward_only(session: TrainingSession, batches: Iterable[Batch]) -> None:
    """`StepFn.forward_only` for a model that the session's forward runs as a whole."""
    with without_trace(session):
        for batch in batches:
            session.forward(session.model, to_device(batch, session.device))


@attrs.define(slots=False)
class Sums:
    """What a step adds up on the device, without a graph.

    Attributes:
        loss: cross-entropy over supervised tokens. main: the training loss, z-loss included.
        terms: by metric name, the scaled extra terms of the objective.
    """

    loss: Tensor = attrs.field(init=False)
    main: Tensor = attrs.field(init=False)
    terms: dict[str, Tensor] = attrs.Factory(dict)

    def count(self, loss: Tensor, main: Tensor) -> None:
        """Add the losses of a micro-batch."""
        first = not hasattr(self, "loss")
        self.loss = loss if first else self.loss + loss
        self.main = main if first else self.main + main

    def add(self, name: str, value: Tensor) -> None:
        """Add to a term."""
        self.terms[name] = self.terms[name] + value if name in self.terms else value


def close_step(session: TrainingSession, counts: dict[str, int], sums: Sums, scale: float) -> StepResult:
    """What follows the last backward of a step: its objective, norm, clip, guard, optimizer.

    Args:
        counts: global counts of the step; without a supervised token nothing is updated.
        sums: this rank's parts; attached losses are added to its terms.
        scale: 1 / count of supervised tokens.
    """
    for name, value in session.attached.totals().items():
        sums.terms[name] = value
    loss, objective = sums.loss * scale, sums.main * scale
    for value in sums.terms.values():
        objective = objective + value
    if counts["tokens"]:
        update = apply_update(session, objective, sums=(loss,))
        (loss,) = update.sums
    else:
        update = skip_update(session, objective)
    return StepResult(
        loss=loss,
        objective=update.loss,
        grad_norm=update.grad_norm,
        ok=update.ok,
        tokens=counts.get("positions", counts["tokens"]),
        counts=counts,
        sums=sums.terms,
    )


class AccumulateStep:
    """Each micro-batch adds the gradient of its summed loss over the global count of supervised tokens."""

    def train(self, session: TrainingSession, step: int) -> StepResult:
        """One update from `grad_accum_steps` micro-batches. A step without a supervised token changes
        nothing."""
        batches = session.stream.take(session.grad_accum_steps)
        counts = count_step(session, batches)
        scale = 1.0 / max(counts["tokens"], 1)
        factor: float | Tensor = 1.0 if session.scaler is None else session.scaler.begin()
        session.attached.begin_step(counts, factor)
        sums = Sums()
        several = session.control is not None and len(batches) > 1
        with session.attached.activate():
            for i, batch in enumerate(batches):
                if several and i in (0, len(batches) - 1):  # ranks add up their gradients once
                    _set_gradient_sync(session, i > 0)
                self._micro_batch(session, to_device(batch, session.device), counts, scale, sums)
        return close_step(session, counts, sums, scale)

    def _micro_batch(
        self, session: TrainingSession, batch: Batch, counts: Mapping[str, int], scale: float, sums: Sums
    ) -> None:
        """Forward and backward of `scale * loss_sum` and the loss terms."""
        output = session.forward(session.model, batch)
        extra: Tensor | None = None
        seen = output.batch or batch
        for term in session.loss_terms:
            value = term.term(session.model, seen, output) * (term.weight / max(counts[term.per], 1))
            sums.add(f"loss/{term.name}", value.detach())
            extra = value if extra is None else extra + value
        main = output.loss_sum
        sums.count(output.token_loss.sum(), main.detach())
        if extra is not None:
            main = main * scale + extra
            scale = 1.0
        if main.requires_grad:
            # the factor comes in as the gradient, which saves a product forward and one backward
            seed = main.new_full((), scale)
            if session.scaler is not None:
                seed = seed * session.scaler.scale
            main.backward(seed)  # type: ignore[no-untyped-call]

    def forward_only(self, session: TrainingSession, batches: Iterable[Batch]) -> None:
        """Run the model over micro-batches and keep nothing."""
        forward_only(session, batches)

    def evaluate(self, session: TrainingSession, batches: Iterable[Batch]) -> dict[str, float]:
        """Sum of token losses and count of supervised tokens, over all ranks; one read-back at the end.

        All ranks leave after the same batch when any was asked to stop; the sums are then those of this rank.
        """
        total = torch.zeros((), dtype=torch.float64, device=session.device)
        tokens = 0
        for batch in batches:
            tokens += session.forward.count(batch)["tokens"]
            total += session.forward(session.model, to_device(batch, session.device)).token_loss.sum()
            if session.check_stop():
                return {"loss_sum": float(total), "tokens": float(tokens)}
        if session.control is not None:
            mesh = session.mesh
            both = torch.stack((total / mesh.loss_copies, total.new_full((), tokens * mesh.counts_data)))
            torch.distributed.all_reduce(both)
            loss_sum, count = both.tolist()
            return {"loss_sum": loss_sum, "tokens": count}
        return {"loss_sum": float(total), "tokens": float(tokens)}


def _set_gradient_sync(session: TrainingSession, on: bool) -> None:
    from forge_core.parallel.sync import set_gradient_sync  # slow to import, and one process needs none

    set_gradient_sync(session.model, on)


def text_step(session: TrainingSession, step: int) -> StepResult:
    """The core's step as a function: one accumulated update, see `AccumulateStep.train`."""
    return AccumulateStep().train(session, step)
