"""Non-linearities by the names that options have for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forge_core.model.mlp import ACTIVATIONS as THEIRS


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), which approximates GELU (Hendrycks & Gimpel 2016, section 2)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {**THEIRS, "quick_gelu": quick_gelu}
"""The core's, and CLIP's."""
