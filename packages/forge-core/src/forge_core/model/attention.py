"""Grouped-query attention with rotary positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerContext
from forge_core.model.cache import KVCache
from forge_core.model.dimensions import Dimensions
from forge_core.model.kernels import attend
from forge_core.model.norm import RMSNorm
from forge_core.model.roles import mark
from forge_core.model.rope import rotate


class Attention(nn.Module):
    """The core's mixer: causal, keys and values shared by groups of query heads (Ainslie et al. 2023).

    `attend` is an attribute, so that a transform can put another kernel in its place
    (`forge_core.model.attend` has the signature). The number of heads is taken from the width of the
    projections, which sharding may divide.

    Args:
        model: the resolved table.
        index: number of the layer; its entry in `context.cache`.
    """

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__()
        d = Dimensions.of(model)
        self.index = index
        self.head_dim = d.head_dim
        queries, keys = d.n_heads * d.head_dim, d.n_kv_heads * d.head_dim
        self.q_proj = nn.Linear(d.dim, queries, bias=model.attention_bias)
        self.k_proj = nn.Linear(d.dim, keys, bias=model.attention_bias)
        self.v_proj = nn.Linear(d.dim, keys, bias=model.attention_bias)
        self.o_proj = mark(nn.Linear(queries, d.dim, bias=model.output_bias), init="residual")
        self.q_norm = RMSNorm(d.head_dim, eps=model.norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(d.head_dim, eps=model.norm_eps) if model.qk_norm else None
        self.attend = attend

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), the residual not added."""
        rows, length, _ = x.shape
        q = self.q_proj(x).view(rows, length, -1, self.head_dim)
        k = self.k_proj(x).view(rows, length, -1, self.head_dim)
        v = self.v_proj(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = context.cos, context.sin
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if context.cache is not None:
            k, v = context.cache[self.index].append(k, v)
        y = self.attend(q, k, v, context.mask)
        return self.o_proj(y.transpose(1, 2).reshape(rows, length, -1))  # type: ignore[no-any-return]

    def new_cache(self, batch: int, length: int, device: Any = None, dtype: Any = None) -> KVCache:
        """Room for the keys and values of `length` tokens in `batch` rows."""
        return KVCache(batch, length, device, dtype)
