"""The parts of the model that newfamily brings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from forge_core.contract import Batch, LayerContext, Output
from forge_core.model import mark


class SquaredReluFFN(nn.Module):
    """down(relu(up(x)) ** 2) (So et al. 2021, Primer, section 3.2).

    Args:
        dim: D, width of the residual stream.
        hidden: width between the matrices.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        # what writes to the residual stream starts smaller the deeper the model is
        self.down_proj = mark(nn.Linear(hidden, dim, bias=False), init="residual")

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), the residual not added."""
        y: Tensor = self.down_proj(torch.relu(self.up_proj(x)).square())
        return y


def mean_square(model: nn.Module, batch: Batch, output: Output) -> Tensor:
    """The mean square of each hidden state, summed over supervised tokens: () fp32."""
    assert output.hidden is not None  # asked for with needs="hidden"
    supervised = batch["targets"] != -100
    return output.hidden.float().square().mean(-1).mul(supervised).sum()


def largest_weight(parts: Sequence[SquaredReluFFN]) -> Tensor | None:
    """The largest absolute weight of all parts, () on the device; None without parts."""
    largest = [part.down_proj.weight.detach().abs().max() for part in parts]
    return torch.stack(largest).max() if largest else None
