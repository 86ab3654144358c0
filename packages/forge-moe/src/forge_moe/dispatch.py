"""Tokens in the order of their experts, and back: gathers both ways, so that sums have one order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge_moe.routing import Routing


class Groups(NamedTuple):
    """Assignments in the order of their experts.

    Attributes:
        order: (A,) the assignment at each place; those of no expert come last.
        place: (A,) the place of each assignment.
        counts: (E,) int64, assignments of each expert.
    """

    order: Tensor
    place: Tensor
    counts: Tensor

    @property
    def ends(self) -> Tensor:
        """(E,) int32, one past the last place of each expert."""
        return self.counts.cumsum(0).to(torch.int32)


def group(expert: Tensor, num_experts: int) -> Groups:
    """Sort assignments (A,) by expert, in their order inside each; `num_experts` stands for none."""
    order = expert.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return Groups(order, place, count(expert, num_experts))


def count(expert: Tensor, num_experts: int) -> Tensor:
    """(E,) int64, how many assignments (A,) each expert has."""
    sizes = expert.new_zeros(num_experts + 1)
    return sizes.scatter_add_(0, expert, torch.ones_like(expert))[:num_experts]


def scatter_tokens(x: Tensor, groups: Groups, routing: Routing, top_k: int) -> Tensor:
    """x (T, D) -> (A, D), the token of each assignment in the order of experts."""
    if routing.token is not None:
        return x.index_select(0, routing.token.index_select(0, groups.order))
    rows: Tensor = _Repeat.apply(x, groups.order, groups.place, top_k)  # type: ignore[no-untyped-call]
    return rows


def combine(rows: Tensor, groups: Groups, routing: Routing, top_k: int, tokens: int) -> Tensor:
    """rows (A, D), what experts give, in their order -> (T, D), weighted and summed for each token.

    Weights and sums are in the precision of the weights (fp32 at least), whatever the experts computed in.
    """
    weight = routing.weight
    if routing.token is not None:
        rows = rows.to(weight.dtype) * weight.index_select(0, groups.order)[:, None]
        out = rows.new_zeros(tokens, rows.shape[1])
        return out.index_add(0, routing.token.index_select(0, groups.order), rows)
    back: Tensor = Permute.apply(rows, groups.place, groups.order)  # type: ignore[no-untyped-call]
    parts = back.view(tokens, top_k, back.shape[-1]).to(weight.dtype)
    with torch.autocast(rows.device.type, enabled=False):
        return torch.bmm(weight.view(tokens, 1, top_k), parts).squeeze(1)


class Permute(torch.autograd.Function):
    """Rows in another order; the gradient is a gather by the inverse, where autograd's own would add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


class _Repeat(torch.autograd.Function):
    """Row a // k of x for assignment a, in the order of experts; the gradient sums the k of each token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.top_k = top_k
        return x.index_select(0, order.div(top_k, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        width = gradient.shape[-1]
        parts = gradient.index_select(0, place).view(len(place) // ctx.top_k, ctx.top_k, width)
        return parts.sum(1), None, None, None
