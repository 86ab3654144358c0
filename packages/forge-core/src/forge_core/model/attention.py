"""Grouped-query attention with rotary positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerContext, TensorPlan
from forge_core.model.cache import KVCache
from forge_core.model.dimensions import Dimensions
from forge_core.model.kernels import attend
from forge_core.model.norm import RMSNorm
from forge_core.model.roles import mark
from forge_core.model.rope import rotate


class Attention(nn.Module):
    """The core's mixer: causal, keys and values shared by groups of query heads (Ainslie et al. 2023).

    `attend` is an attribute, so that a transform can put another kernel in its place
    (`forge_core.model.attend` has the signature; `scale` and `softcap` are passed where `[model]` sets them,
    and a kernel that cannot do them has to refuse). The number of heads is taken from the width of the
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
        self.norm_all_heads = model.qk_norm and model.qk_norm_over == "all_heads"
        widths = (queries, keys) if self.norm_all_heads else (d.head_dim, d.head_dim)
        eps, offset = model.norm_eps, model.norm_unit_offset
        self.q_norm = RMSNorm(widths[0], eps, offset) if model.qk_norm else None
        self.k_norm = RMSNorm(widths[1], eps, offset) if model.qk_norm else None
        self.attend = attend
        given = {"scale": model.attention_scale, "softcap": model.attention_softcap}
        self.scores = {name: value for name, value in given.items() if value is not None}

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), the residual not added."""
        q, k, v = self.project(x, context)
        if context.cache is not None:
            k, v = context.cache[self.index].append(k, v)
        return self.output(self.attend(q, k, v, context.mask, **self.scores))

    def project(self, x: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S, D) -> queries (B, heads, S, W), keys and values (B, kv_heads, S, W), normed and rotated."""
        rows, length, _ = x.shape
        q, k = self.q_proj(x), self.k_proj(x)
        if self.norm_all_heads:
            q, k = self._normed(q, k)
        q, k = q.view(rows, length, -1, self.head_dim), k.view(rows, length, -1, self.head_dim)
        v = self.v_proj(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
        if not self.norm_all_heads:
            q, k = self._normed(q, k)
        cos, sin = context.cos, context.sin
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v

    def output(self, y: Tensor) -> Tensor:
        """What `attend` gives, (B, heads, S, W) -> (B, S, D)."""
        return self.o_proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)

    def new_cache(self, batch: int, length: int, device: Any = None, dtype: Any = None) -> KVCache:
        """Room for the keys and values of `length` tokens in `batch` rows."""
        return KVCache(batch, length, device, dtype)

    def parallel_plan(self) -> TensorPlan:
        """Heads divided over tensor ranks (Shoeybi et al. 2019)."""
        norms = () if self.q_norm is None else ("q_norm", "k_norm")
        return TensorPlan(
            column=("q_proj", "k_proj", "v_proj"),
            row=("o_proj",),
            heads=() if self.norm_all_heads else norms,
            whole=norms if self.norm_all_heads else (),
            sequence="attend",
        )
