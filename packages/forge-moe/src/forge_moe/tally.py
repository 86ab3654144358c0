"""What a layer counts while it trains: once, also where a backward computes the forward again."""

from __future__ import annotations

import torch
from torch import Tensor

from forge_moe.dispatch import count
from forge_moe.routing import Routing

EXTRAS = 3
"""Numbers of a tally after the counts of experts: valid tokens, dropped assignments, sum of entropies."""


def add_once(total: Tensor, value: Tensor) -> None:
    """`total += value` in a forward, and nothing where a backward recomputes it."""
    if torch.compiler.is_compiling():
        _add_in_forward(total, value)
    elif torch._C._current_graph_task_id() == -1:
        total.add_(value)


@torch.library.custom_op("forge_moe::add_in_forward", mutates_args=("total",))
def _add_in_forward(total: Tensor, value: Tensor) -> None:
    if torch._C._current_graph_task_id() == -1:
        total.add_(value)


@_add_in_forward.register_fake
def _(total: Tensor, value: Tensor) -> None:
    return None


@torch.no_grad()
def observed(routing: Routing, valid: Tensor | None, num_experts: int, dropped: Tensor | None) -> Tensor:
    """(E + EXTRAS,) what this forward adds to the tally of its layer.

    Args:
        routing: before anything was dropped.
        valid: (T,) or None.
        dropped: () assignments that were dropped, None without a capacity.
    """
    scores = routing.scores.detach()
    entropy = torch.special.entr(scores).sum(-1)
    if valid is None:
        tokens = scores.new_full((), scores.shape[0])
    else:
        entropy, tokens = entropy * valid, valid.sum()
    lost = scores.new_zeros(()) if dropped is None else dropped
    extras = torch.stack([tokens.to(scores), lost.to(scores), entropy.sum()])
    return torch.cat([count(routing.expert, num_experts).to(scores), extras])
