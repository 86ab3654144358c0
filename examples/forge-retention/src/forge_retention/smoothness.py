"""Temporal activation regularisation (Merity et al. 2017, "Revisiting activation regularization")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forge_core.contract import Batch, Output


def smoothness(model: nn.Module, batch: Batch, output: Output) -> Tensor:
    """Mean square of the change between neighbouring hidden states of a document.

    Returns:
        () fp32, summed over the supervised tokens of the micro-batch.
    """
    assert output.hidden is not None  # asked for with needs="hidden"
    change = output.hidden.float().diff(dim=1).square().mean(-1)
    counts = batch["targets"][:, 1:] != -100
    documents = batch.get("documents")
    if documents is not None:
        counts = counts & (documents[:, 1:] == documents[:, :-1])
    return torch.where(counts, change, 0.0).sum()
