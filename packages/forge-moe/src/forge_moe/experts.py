"""The routed experts of a layer, packed: one parameter for each of their matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forge_core.model import mark
from forge_core.model.mlp import ACTIVATIONS
from forge_moe.grouped import grouped_linear

RANGE = 8.0
"""How far `moe.gradient_scaling` goes from 1 either way."""


class Experts(nn.Module):
    """down(act(gate(x)) * up(x)) for each expert, or down(act(up(x))) where `gated` is off.

    Args:
        num_experts: E. dim: D. hidden: F, width of one expert.
        activation: as `model.activation` names it.
        bias: add one behind every product.
        kernel: see `grouped_linear`.
        scaled: multiply each expert's gradients by `scale` (E,), see `gradient_scale`.

    Attributes:
        active_share: of its parameters, that a token uses.
    """

    active_share: float = 1.0

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        kernel: str = "auto",
        scaled: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts, self.kernel = num_experts, kernel
        self.activation = ACTIVATIONS[activation]
        shape = (num_experts, hidden, dim)
        self.w_gate = nn.Parameter(torch.empty(shape)) if gated else None
        self.w_up = nn.Parameter(torch.empty(shape))
        self.w_down = nn.Parameter(torch.empty(num_experts, dim, hidden))
        for name in ("w_gate", "w_up", "w_down") if gated else ("w_up", "w_down"):
            mark(self, name, role="matrices", init="residual" if name == "w_down" else "normal")
        self.b_gate = nn.Parameter(torch.empty(shape[:2])) if gated and bias else None
        self.b_up = nn.Parameter(torch.empty(shape[:2])) if bias else None
        self.b_down = nn.Parameter(torch.empty(num_experts, dim)) if bias else None
        for name in ("b_gate", "b_up", "b_down"):
            if getattr(self, name) is not None:
                mark(self, name, role="bias")
        self.scale: Tensor | None
        self.register_buffer("scale", torch.empty(num_experts) if scaled else None, persistent=False)
        if scaled:
            mark(self, "scale", init="ones")

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x (A, D) in groups that end at `ends` (E,) int32 -> (A, D), 0 in rows of no group."""
        x = _as_computed(x)
        up = self._times(x, self.w_up, self.b_up, ends)
        if self.w_gate is None:
            hidden = self.activation(up)
        else:
            hidden = self.activation(self._times(x, self.w_gate, self.b_gate, ends)) * up
        return self._times(hidden, self.w_down, self.b_down, ends)

    def _times(self, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
        product = grouped_linear(x, self._scaled(weight).to(x.dtype), ends, self.kernel)
        if bias is None:
            return product
        return product + by_group(self._scaled(bias).to(x.dtype), ends, len(x))

    def _scaled(self, parameter: Tensor) -> Tensor:
        part = local(parameter)
        if self.scale is None or not self.training:
            return part
        scaled: Tensor = _ScaleGradient.apply(part, local(self.scale))  # type: ignore[no-untyped-call]
        return scaled


def by_group(values: Tensor, ends: Tensor, rows: int) -> Tensor:
    """(E, F) as (rows, F): to each row the values of its group, see `grouped_linear`; 0 in rows of none."""
    number = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    group = torch.searchsorted(ends, number, right=True)
    return torch.cat((values, values.new_zeros(1, values.shape[1]))).index_select(0, group)


def gradient_scale(counts: Tensor) -> Tensor:
    """(E,) by what the gradients of each expert are multiplied, from the counts (E,) of an update.

    An expert with half of the mean load counts twice: its step is as large as if it had had the mean.
    """
    scale = counts.mean() / counts
    return torch.nan_to_num(scale, nan=1.0).clamp(1 / RANGE, RANGE)


def local(parameter: Tensor) -> Tensor:
    """This rank's experts of a parameter that ranks may divide."""
    part: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part


def _as_computed(x: Tensor) -> Tensor:
    """x in the dtype that matrix products have under autocast, which passes by operators it does not know."""
    kind = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


class _ScaleGradient(torch.autograd.Function):
    """The weight unchanged; its gradient times a number for each expert."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradient * scale.to(gradient.dtype).view(-1, *[1] * (gradient.ndim - 1)), None
