"""The global gradient norm and clipping by it, without a host sync."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """L2 norm over all gradients as one vector, () in fp32 (fp64 for fp64 gradients); 0 without gradients.

    Low-precision gradients are summed in fp32.
    """
    if not grads:
        return torch.zeros(())
    dtype = torch.float64 if grads[0].dtype is torch.float64 else torch.float32
    norms = torch._foreach_norm(list(grads), 2.0, dtype=dtype)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def clip_(grads: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scale gradients in place by min(1, limit / norm), the same factor for all."""
    if not grads:
        return
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(list(grads), factor)
