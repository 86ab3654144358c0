"""The balance loss of a whole update: its routes are counted before it is trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_core.contract import Batch
from forge_moe.balance import Balance
from forge_moe.ffn import MoeFFN

if TYPE_CHECKING:
    from forge_core import TrainingSession


def route_counter(session: TrainingSession, balance: Balance) -> Callable[[int, Sequence[Batch]], None]:
    """Puts into `step_counts` of each layer how often an update chooses each expert (E,), over all ranks.

    So the share of each expert in the loss is that of the whole update, and the loss adds up over
    micro-batches: any split of a batch gives the gradient of one big batch. It costs one more forward, which
    every rank of a pipeline takes part in, also one whose stages have no experts.
    """

    def count(step: int, batches: Sequence[Batch]) -> None:
        _count(session, batches, balance.layers)
        if balance.reduce is not None and balance.layers:
            counts = torch.stack([_counts(layer) for layer in balance.layers])
            balance.reduce(counts)
            for layer, row in zip(balance.layers, counts, strict=True):
                _counts(layer).copy_(row)

    return count


def _count(session: TrainingSession, batches: Sequence[Batch], layers: Sequence[MoeFFN]) -> None:
    """The counts of this rank's tokens."""
    for layer in layers:
        if layer.step_counts is None:
            layer.step_counts = torch.zeros(layer.moe.num_experts, dtype=torch.long, device=session.device)
        layer.counting = layer.step_counts.zero_()
    try:
        session.step_fn.forward_only(session, batches)
    finally:
        for layer in layers:
            layer.counting = None


def _counts(layer: MoeFFN) -> Tensor:
    assert layer.step_counts is not None
    return layer.step_counts
