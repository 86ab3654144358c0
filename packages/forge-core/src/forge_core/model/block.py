"""One layer of the decoder."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerContext
from forge_core.model.norm import build_norm


class Block(nn.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x)) (pre-norm).

    Args:
        model: the resolved table.
        mixer, ffn: `forward(x, context) -> (B, S, D)`; called `attn` and `mlp` in parameter names, whatever
        they are.
    """

    def __init__(self, model: ModelConfig, mixer: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        self.attn_norm = build_norm(model, model.dim)
        self.attn = mixer
        self.mlp_norm = build_norm(model, model.dim)
        self.mlp = ffn
        self.dropout = model.dropout

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), residuals included."""
        y = self.attn(self.attn_norm(x), context)
        if self.dropout:
            y = F.dropout(y, self.dropout, self.training)
        x = x + y
        y = self.mlp(self.mlp_norm(x), context)
        if self.dropout:
            y = F.dropout(y, self.dropout, self.training)
        result: Tensor = x + y
        return result

    def new_cache(self, batch: int, length: int, device: Any = None, dtype: Any = None) -> Any:
        """The mixer's own cache, None if it keeps nothing."""
        make = getattr(self.attn, "new_cache", None)
        return None if make is None else make(batch, length, device, dtype)
