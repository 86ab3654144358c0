"""A limit on how many assignments an expert takes."""

from __future__ import annotations

import torch
from torch import Tensor

from forge_moe.routing import Routing


def capacity(assigned: Tensor, tokens: Tensor, num_experts: int, factor: float) -> Tensor:
    """() int64: ceil(assignments * factor / E), within 1 .. tokens (Lepikhin et al. 2020, section 3.2).

    Args:
        assigned: () assignments of the micro-batch, T * K for T valid tokens.
        tokens: () valid tokens, of which each can choose an expert once.
    """
    room = torch.ceil(assigned.double() * (factor / num_experts)).long()
    return torch.minimum(room.clamp(min=1), tokens.clamp(min=1))


def drop_overflow(routing: Routing, top_k: int, num_experts: int, factor: float, priority: str) -> Routing:
    """The routing with what exceeds the capacity of an expert assigned to none.

    The capacity holds for all K choices of all tokens together. A dropped assignment adds nothing to its
    token, and the weights of the others stay.

    Args:
        routing: of a router that gives each token K experts.
        priority: "position": first choices before second ones, and in order of tokens; "score": larger
            weights first, ties in that order.
    """
    expert = routing.expert.view(len(routing.expert) // top_k, top_k)
    tokens, device = expert.shape[0], expert.device
    inside = expert < num_experts
    room = capacity(inside.sum(), inside.any(-1).sum(), num_experts, factor)
    turn = (
        torch.arange(expert.numel(), device=device).view(top_k, tokens).t().reshape(-1)
    )  # by slot, then token
    order = turn.argsort()
    if priority == "score":
        order = order[routing.weight.detach()[order].argsort(descending=True, stable=True)]
    queue = expert.reshape(-1)[order]
    by_expert = queue.argsort(stable=True)
    sizes = expert.new_zeros(num_experts + 1).scatter_add_(0, queue, torch.ones_like(queue))
    starts = sizes.cumsum(0) - sizes
    place = torch.empty_like(queue)
    place[by_expert] = torch.arange(len(queue), device=device) - starts[queue[by_expert]]
    dropped = torch.empty_like(place, dtype=torch.bool)
    dropped[order] = place >= room
    dropped = dropped & inside.reshape(-1)
    return routing._replace(
        expert=routing.expert.masked_fill(dropped, num_experts), weight=routing.weight * ~dropped
    )
