"""Where the documents of packed rows begin.

A document is a run of one number; a number does not come back in its row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def positions_within(documents: Tensor) -> Tensor:
    """Position of every token inside its document, on the device and without a host sync.

    Args:
        documents: (B, S) integers.

    Returns:
        (B, S) int64, 0 at each document's first token.
    """
    index = torch.arange(documents.shape[1], device=documents.device)
    first = torch.zeros(documents.shape, dtype=torch.int64, device=documents.device)
    first[:, 1:] = torch.where(documents[:, 1:] != documents[:, :-1], index[1:], 0)
    return index - first.cummax(1).values


def run_lengths(documents: Tensor) -> list[int]:
    """Tokens of each document, row after row; a row's end ends a document. Reads the tensor on the host.

    Args:
        documents: (B, S) integers.

    Returns:
        Lengths that sum to B * S.
    """
    numbers = documents.cpu().numpy()
    starts = np.ones(numbers.shape, dtype=np.bool_)
    np.not_equal(numbers[:, 1:], numbers[:, :-1], out=starts[:, 1:])
    lengths: list[int] = np.diff(np.flatnonzero(starts), append=numbers.size).tolist()
    return lengths


def run_bounds(documents: Tensor, most: int | None = None) -> Tensor:
    """Where each document begins among all B * S tokens, and the last ends.

    Args:
        documents: (B, S) integers.
        most: a number of documents that they do not exceed; None counts them, which reads the tensor on the
            host.

    Returns:
        (most + 1,) int32 on the device of `documents`, ascending; after the last document all are B * S.
    """
    if most is None:
        lengths = torch.tensor([0, *run_lengths(documents)], dtype=torch.int32)
        return lengths.cumsum(0, dtype=torch.int32).to(documents.device)
    starts = torch.ones(documents.shape, dtype=torch.bool, device=documents.device)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    number = starts.flatten().cumsum(0) - 1
    return torch.searchsorted(number, torch.arange(most + 1, device=documents.device), out_int32=True)
