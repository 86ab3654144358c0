"""Products of many matrices with consecutive groups of rows, as one operator.

`torch.nn.functional.grouped_mm` does it where dtype, alignment and device allow it; elsewhere one product an
expert runs after another. Both are behind one operator with its own gradient, so that compiled code and
recomputation see no difference.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 16
"""Bytes that every stride must be a multiple of for `grouped_mm`."""


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, kernel: str = "auto") -> Tensor:
    """Rows of group e of x times weight[e] transposed, with gradients for x and weight.

    Args:
        x: (A, D). weight: (E, F, D), of the same dtype.
        ends: (E,) int32, one past the last row of each group; group e starts where e - 1 ends. Rows after the
            last group give 0, and their gradient is 0.
        kernel: "grouped", "loop" or "auto", see `uses_grouped`.

    Returns:
        (A, F).

    Raises:
        RuntimeError: "grouped" where it is not possible.
    """
    product: Tensor = _linear(x, weight, ends, kernel)
    return product


def uses_grouped(kernel: str, *operands: Tensor) -> bool:
    """Whether the grouped kernel multiplies these operands, (rows, columns) or (E, rows, columns)."""
    if kernel != "auto":
        return kernel == "grouped"
    first = operands[0]
    if first.device.type == "cuda":
        fits = first.dtype == torch.bfloat16 and torch.cuda.get_device_capability(first.device) >= (8, 0)
    else:
        fits = first.device.type == "cpu" and first.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return fits and all(_aligned(operand) for operand in operands)


def _aligned(x: Tensor) -> bool:
    return all(s == 1 or s * x.element_size() % ALIGNMENT == 0 for s in x.stride()) and min(x.shape) > 0


@torch.library.custom_op("forge_moe::grouped_linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, ends: Tensor, kernel: str) -> Tensor:
    x = x.contiguous()
    return _rows_times(x, weight.transpose(1, 2), ends, kernel)


@_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, kernel: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("forge_moe::grouped_linear_backward", mutates_args=())
def _linear_backward(gradient: Tensor, weight: Tensor, ends: Tensor, kernel: str) -> Tensor:
    return _rows_times(gradient.contiguous(), weight, ends, kernel)


@_linear_backward.register_fake
def _(gradient: Tensor, weight: Tensor, ends: Tensor, kernel: str) -> Tensor:
    return gradient.new_empty(gradient.shape[0], weight.shape[2])


@torch.library.custom_op("forge_moe::grouped_outer", mutates_args=())
def _outer(gradient: Tensor, x: Tensor, ends: Tensor, kernel: str) -> Tensor:
    """(A, F), (A, D) -> (E, F, D): the transposed rows of each group of one times those of the other."""
    gradient, x = gradient.contiguous(), x.contiguous()
    if uses_grouped(kernel, gradient, x):
        return F.grouped_mm(gradient.t(), x, offs=ends)
    out = gradient.new_zeros(len(ends), gradient.shape[1], x.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(gradient[start:end].t(), x[start:end], out=out[expert])
        start = end
    return out


@_outer.register_fake
def _(gradient: Tensor, x: Tensor, ends: Tensor, kernel: str) -> Tensor:
    return gradient.new_empty(ends.shape[0], gradient.shape[1], x.shape[1])


def _rows_times(x: Tensor, weight: Tensor, ends: Tensor, kernel: str) -> Tensor:
    """(A, M) times (E, M, N) by groups -> (A, N); rows of no group are 0."""
    if uses_grouped(kernel, x, weight):
        product = F.grouped_mm(x, weight, offs=ends)
        # the kernel leaves rows of no group as the memory was
        if product.device.type == "cpu":  # where the host need not wait to know which they are
            product[int(ends[-1]) :].zero_()
            return product
        outside = torch.arange(len(x), device=x.device) >= ends[-1]
        return product.masked_fill_(outside[:, None], 0)
    out = x.new_empty(x.shape[0], weight.shape[2])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert], out=out[start:end])
        start = end
    out[start:].zero_()
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ends, kernel = inputs
    ctx.save_for_backward(x, weight, ends)
    ctx.kernel = kernel


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight, ends = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    by_x = _linear_backward(gradient, weight, ends, ctx.kernel) if needs_x else None
    by_weight = _outer(gradient, x, ends, ctx.kernel) if needs_weight else None
    return by_x, by_weight, None, None


_linear.register_autograd(_backward, setup_context=_save)
