"""Multi-head latent attention (DeepSeek-AI 2024, V2, section 2.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerContext, TensorPlan
from forge_core.model import mark
from forge_core.model.cache import KVCache
from forge_core.model.kernels import attend
from forge_core.model.norm import RMSNorm
from forge_core.model.rope import rotate
from forge_moe.table import MlaConfig

EPS = 1e-6
"""Of the norms of the latent vectors, whatever the model's own is (as in DeepSeek's code)."""


class LatentAttention(nn.Module):
    """Keys and values of all heads from one latent vector a token, beside one rotated key that heads share.

    A head's query and key are a part without positions (`nope_dim`) and a rotated one (`model.head_dim`).
    Scores are divided by the root of both widths together, unless `model.attention_scale` says otherwise.
    `model.attention_bias` is one of the matrices that make latent vectors.

    Args:
        model, mla: resolved tables.
        index: number of the layer; its entry in `context.cache`.
    """

    def __init__(self, model: ModelConfig, mla: MlaConfig, index: int) -> None:
        super().__init__()
        assert model.head_dim is not None
        self.index, self.mla = index, mla
        self.heads, self.rope_dim = model.n_heads, model.head_dim
        queries = self.heads * (mla.nope_dim + self.rope_dim)
        self.q_proj = self.q_a_proj = self.q_a_norm = self.q_b_proj = None
        if mla.q_rank:
            self.q_a_proj = nn.Linear(model.dim, mla.q_rank, bias=model.attention_bias)
            self.q_a_norm = RMSNorm(mla.q_rank, EPS)
            self.q_b_proj = nn.Linear(mla.q_rank, queries, bias=False)
        else:
            self.q_proj = nn.Linear(model.dim, queries, bias=False)
        self.kv_a_proj = nn.Linear(model.dim, mla.kv_rank + self.rope_dim, bias=model.attention_bias)
        self.kv_a_norm = RMSNorm(mla.kv_rank, EPS)
        self.kv_b_proj = nn.Linear(mla.kv_rank, self.heads * (mla.nope_dim + mla.v_dim), bias=False)
        out = nn.Linear(self.heads * mla.v_dim, model.dim, bias=model.output_bias)
        self.o_proj = mark(out, init="residual")
        self.scores = {"scale": model.attention_scale or (mla.nope_dim + self.rope_dim) ** -0.5}
        if model.attention_softcap is not None:
            self.scores["softcap"] = model.attention_softcap
        self.attend = attend

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), the residual not added."""
        q, k, v = self.project(x, context)
        if context.cache is not None:
            k, v = context.cache[self.index].append(k, v)
        return self.output(self.attend(q, k, v, context.mask, **self.scores))

    def project(self, x: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S, D) -> queries and keys (B, heads, S, nope_dim + rope_dim), values (B, heads, S, v_dim)."""
        rows, length, _ = x.shape
        q = self._queries(x).view(rows, length, self.heads, self.mla.nope_dim + self.rope_dim)
        q_plain, q_rotated = torch.split(q, [self.mla.nope_dim, self.rope_dim], -1)
        latent, k_rotated = torch.split(self.kv_a_proj(x), [self.mla.kv_rank, self.rope_dim], -1)
        expanded = self.kv_b_proj(self.kv_a_norm(latent))
        expanded = expanded.view(rows, length, self.heads, self.mla.nope_dim + self.mla.v_dim)
        k_plain, v = torch.split(expanded, [self.mla.nope_dim, self.mla.v_dim], -1)
        q_rotated, k_rotated = (
            self._rotated(q_rotated, context),
            self._rotated(k_rotated[:, :, None], context),
        )
        q = torch.cat([q_plain, q_rotated], -1).transpose(1, 2)
        k = torch.cat([k_plain, k_rotated.expand(-1, -1, self.heads, -1)], -1).transpose(1, 2)
        return q, k, v.transpose(1, 2)

    def output(self, y: Tensor) -> Tensor:
        """What `attend` gives, (B, heads, S, v_dim) -> (B, S, D)."""
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out

    def _queries(self, x: Tensor) -> Tensor:
        if self.q_a_proj is not None and self.q_a_norm is not None:
            x = self.q_a_norm(self.q_a_proj(x))
        last = self.q_proj if self.q_b_proj is None else self.q_b_proj
        assert last is not None
        made: Tensor = last(x)
        return made

    def _rotated(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, heads, rope_dim), pairs brought into halves first where they are neighbours."""
        if context.cos is None or context.sin is None:
            return x
        if self.mla.interleaved:
            x = torch.cat([x[..., 0::2], x[..., 1::2]], -1)
        return rotate(x, context.cos, context.sin)

    def new_cache(self, batch: int, length: int, device: Any = None, dtype: Any = None) -> KVCache:
        """Room for the expanded keys and values of `length` tokens in `batch` rows."""
        return KVCache(batch, length, device, dtype)

    def parallel_plan(self) -> TensorPlan:
        """Context ranks can divide the sequence. Tensor ranks run all of it alike."""
        return TensorPlan(sequence="attend")
