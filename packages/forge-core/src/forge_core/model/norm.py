"""Norms whose arithmetic is fp32 at least, whatever the precision of input and weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core.config.tables import ModelConfig
from forge_core.model.roles import mark


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019).

    torch's kernel works in fp32 for bf16 and fp16 and rounds once, after the weight; it wants weight and
    input of one precision, which autocast does not give on its own.

    Args:
        width: of the last dimension.
        eps: added to the mean of squares.
        unit_offset: multiply by 1 + weight, the sum in fp32 at least; weights start at 0.
    """

    def __init__(self, width: int, eps: float | None = None, unit_offset: bool = False) -> None:
        super().__init__(width, eps=eps)
        self.unit_offset = unit_offset
        if unit_offset:
            mark(self, init="zeros")

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width) in the input's dtype."""
        weight = _offset(self.weight) if self.unit_offset else self.weight
        if x.dtype == weight.dtype:
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)
        wide = torch.promote_types(x.dtype, weight.dtype)
        return F.rms_norm(x.to(wide), self.normalized_shape, weight.to(wide), self.eps).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (Ba et al. 2016).

    Args:
        width, eps, unit_offset: see `RMSNorm`.
    """

    def __init__(self, width: int, eps: float = 1e-5, unit_offset: bool = False) -> None:
        super().__init__(width, eps=eps)
        self.unit_offset = unit_offset
        if unit_offset:
            mark(self, init="zeros")

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width) in the input's dtype."""
        weight = _offset(self.weight) if self.unit_offset else self.weight
        bias: Tensor | None = self.bias
        if x.dtype == weight.dtype:
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        wide = torch.promote_types(x.dtype, weight.dtype)
        wide_bias = None if bias is None else bias.to(wide)
        y = F.layer_norm(x.to(wide), self.normalized_shape, weight.to(wide), wide_bias, self.eps)
        return y.to(x.dtype)


def _offset(weight: Tensor) -> Tensor:
    """1 + weight, not rounded below fp32."""
    return 1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32))


def build_norm(model: ModelConfig, width: int) -> nn.Module:
    """The norm that `model.norm_type` names, over the last dimension of size `width`."""
    if model.norm_type == "layernorm":
        return LayerNorm(width, model.norm_eps, model.norm_unit_offset)
    return RMSNorm(width, model.norm_eps, model.norm_unit_offset)
