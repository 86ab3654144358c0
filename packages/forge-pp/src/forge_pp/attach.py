"""Adding a loss to what a stage hands on, so that the stage's own backward takes it along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def attach_to(tensors: Sequence[Tensor], value: Tensor) -> tuple[Tensor, ...]:
    """The tensors, of which the first that has a gradient gives `value` () the gradient 1 in its backward.

    It is a copy: schedules that take backwards apart detach what a stage gives, which views do not allow.
    """
    found = list(tensors)
    for i, tensor in enumerate(found):
        if tensor.is_floating_point():
            found[i] = _Attach.apply(tensor, value)  # type: ignore[no-untyped-call]
            break
    return tuple(found)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        ctx.dtype = value.dtype
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones((), dtype=ctx.dtype)
