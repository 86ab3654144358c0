"""Balance losses and the z-loss of routers, as sums that add up over micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def z_loss(logits: Tensor, valid: Tensor | None = None) -> Tensor:
    """() sum over valid tokens of the squared log-normaliser of logits (T, E) (Zoph et al. 2022, eq. 5)."""
    squared = logits.logsumexp(-1).square()
    return (squared if valid is None else squared * valid).sum()


def sequence_loss(scores: Tensor, expert: Tensor, rows: int, valid: Tensor | None, counts: Tensor) -> Tensor:
    """() sum over sequences of sum_i f_i P_i (DeepSeek-AI 2024, V3, equations 17 to 20; there times alpha).

    f_i is E times the share of assignments that expert i has of a sequence, P_i the mean of its scores there;
    both over the valid tokens of the sequence. Even load gives 1 a sequence; one without valid tokens 0.

    Args:
        scores: (rows * S, E), each row sums to 1, with a graph.
        expert: (rows * S * K,) actual routes, E for none.
        valid: (rows * S,) or None.
        counts: (rows, E + 1) from `sequence_counts`, of the whole sequences.
    """
    experts = scores.shape[-1]
    length = scores.shape[0] // max(rows, 1)
    by_row = scores.view(rows, length, experts)
    if valid is not None:
        by_row = by_row * valid.view(rows, length, 1)
    counts = counts.to(scores.dtype)
    assigned, tokens = counts[:, :experts], counts[:, experts:]
    share = experts * assigned / assigned.sum(-1, keepdim=True).clamp(min=1)
    return (share * by_row.sum(1) / tokens.clamp(min=1)).sum()


def sequence_counts(expert: Tensor, rows: int, num_experts: int, valid: Tensor | None, tokens: int) -> Tensor:
    """(rows, E + 1) int64: assignments of each expert in each sequence, and its valid tokens.

    Args:
        expert: (rows * tokens * K,), E for none.
        tokens: of a row.
    """
    choices = expert.view(rows, len(expert) // max(rows, 1))
    table = choices.new_zeros(rows, num_experts + 1)
    table.scatter_add_(1, choices, torch.ones_like(choices))
    table[:, num_experts] = tokens if valid is None else valid.view(rows, tokens).sum(1)
    return table


def batch_loss(scores: Tensor, counts: Tensor, valid: Tensor | None) -> Tensor:
    """() sum over valid tokens of E * sum_i f_i p_i (Fedus et al. 2022, equation 4; there their mean).

    Args:
        scores: (T, E) p, each row sums to 1, with a graph.
        counts: (E,) assignments of each expert, of whatever f is taken over.
        valid: (T,) or None.
    """
    share = counts.to(scores.dtype)
    share = scores.shape[-1] * share / share.sum().clamp(min=1)
    per_token = scores @ share
    return (per_token if valid is None else per_token * valid).sum()
