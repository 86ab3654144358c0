"""Dropout whose mask does not depend on how ranks divide the sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core.contract import LayerContext


def dropout(x: Tensor, p: float, training: bool, context: LayerContext) -> Tensor:
    """x (B, S, D) with each element zeroed by chance p and the others divided by 1 - p, while training.

    Where ranks divide the sequence, every one draws the mask of all tokens, from the random state that they
    share, and uses its part: one process would draw the same.
    """
    part = context.part
    if not training or part is None or not part.divides:
        return F.dropout(x, p, training)
    rows, length, width = x.shape
    whole = torch.ones(rows, length * part.count, width, dtype=x.dtype, device=x.device)
    return x * part.residual(F.dropout(whole, p))
