"""The balance loss of a whole update: its routes are counted before it is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_core.contract import Batch, StepResult
from forge_core.loop.accumulate import AccumulateStep, to_device
from forge_moe.ffn import MoeFFN

if TYPE_CHECKING:
    from forge_core import TrainingSession


class CountedStep:
    """The core's step after a forward without gradients over all its micro-batches, which counts routes.

    So the share of each expert in the loss is that of the whole update over all ranks, and the loss adds up
    over micro-batches: any split of a batch gives the gradient of one big batch. It costs one more forward.
    """

    def __init__(self) -> None:
        self.inner = AccumulateStep()

    def train(self, session: TrainingSession, step: int) -> StepResult:
        """Run update `step`."""
        from forge_moe.running import balance_of

        balance = balance_of(session, session.model)
        stream = session.stream
        batches = stream.take(session.grad_accum_steps)
        count_routes(session, batches, balance.layers)
        if balance.reduce is not None and balance.layers:
            counts = torch.stack([_counts(layer) for layer in balance.layers])
            balance.reduce(counts)
            for layer, row in zip(balance.layers, counts, strict=True):
                _counts(layer).copy_(row)
        session.stream = Taken(stream, batches)
        try:
            return self.inner.train(session, step)
        finally:
            session.stream = stream

    def evaluate(self, session: TrainingSession, batches: Iterable[Batch]) -> dict[str, float]:
        """As the core does."""
        return self.inner.evaluate(session, batches)


class Taken:
    """A stream whose next micro-batches have been taken already."""

    def __init__(self, stream: Any, batches: list[Batch]) -> None:
        self.stream, self.batches = stream, batches

    def take(self, count: int) -> list[Batch]:
        assert count == len(self.batches)
        return self.batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def count_routes(session: TrainingSession, batches: Sequence[Batch], layers: Sequence[MoeFFN]) -> None:
    """Put into `step_counts` of each layer the assignments (E,) of this rank in an update.

    The random state is left as it was, so that the forwards that follow draw the same noise.
    """
    for layer in layers:
        if layer.step_counts is None:
            layer.step_counts = torch.zeros(layer.moe.num_experts, dtype=torch.long, device=session.device)
        layer.counting = layer.step_counts.zero_()
    devices = [session.device] if session.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            for batch in batches:
                session.forward(session.model, to_device(batch, session.device))
    finally:
        for layer in layers:
            layer.counting = None
    if session.control is not None:
        from forge_core.parallel.sync import reshard

        reshard(session.model)


def _counts(layer: MoeFFN) -> Tensor:
    assert layer.step_counts is not None
    return layer.step_counts
