"""One layer of the decoder."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerContext
from forge_core.model.dropout import dropout
from forge_core.model.norm import build_norm


class Block(nn.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x)) (pre-norm).

    With `model.block_norm` "post" what is added is norm(mixer(x)) and norm(ffn(x)) (OLMo 2; OLMo et al.
    2024), with "sandwich" norm(mixer(norm(x))) and norm(ffn(norm(x))) (Gemma 2; Gemma Team 2024). Norms that
    are not there are None.

    Args:
        model: the resolved table.
        mixer, ffn: `forward(x, context) -> (B, S, D)`; called `attn` and `mlp` in parameter names, whatever
        they are.
    """

    def __init__(self, model: ModelConfig, mixer: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        before, after = model.block_norm != "post", model.block_norm != "pre"
        self.attn_norm = build_norm(model, model.dim) if before else None
        self.attn = mixer
        self.attn_post_norm = build_norm(model, model.dim) if after else None
        self.mlp_norm = build_norm(model, model.dim) if before else None
        self.mlp = ffn
        self.mlp_post_norm = build_norm(model, model.dim) if after else None
        self.dropout = model.dropout

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), residuals included."""
        y = self.attn(x if self.attn_norm is None else self.attn_norm(x), context)
        if self.attn_post_norm is not None:
            y = self.attn_post_norm(y)
        if self.dropout:
            y = dropout(y, self.dropout, self.training, context)
        x = x + y
        y = self.mlp(x if self.mlp_norm is None else self.mlp_norm(x), context)
        if self.mlp_post_norm is not None:
            y = self.mlp_post_norm(y)
        if self.dropout:
            y = dropout(y, self.dropout, self.training, context)
        result: Tensor = x + y
        return result

    def new_cache(self, batch: int, length: int, device: Any = None, dtype: Any = None) -> Any:
        """The mixer's own cache, None if it keeps nothing."""
        make = getattr(self.attn, "new_cache", None)
        return None if make is None else make(batch, length, device, dtype)
