"""How a sequence is cut into pieces for context ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def pieces_of(length: int, size: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(first, one past the last) of both pieces of one rank.

    The sequence is cut into 2 * `size` pieces, and rank r has those numbered r and 2 * `size` - 1 - r, so
    that all have the same work under a causal mask (zigzag; as in Llama 3, Dubey et al. 2024).
    """
    step = length // (2 * size)
    one, other = rank, 2 * size - 1 - rank
    return (one * step, (one + 1) * step), (other * step, (other + 1) * step)


def places_of(length: int, size: int, rank: int, device: torch.device) -> Tensor:
    """(length / size,) int64 places of one rank's tokens in a sequence of `length`, ascending."""
    return torch.cat(
        [torch.arange(first, last, device=device) for first, last in pieces_of(length, size, rank)]
    )
