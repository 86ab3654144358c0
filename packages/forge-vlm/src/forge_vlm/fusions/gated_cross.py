"""Blocks in place of the decoder's own in which text asks visual tokens, behind gates (Llama 3.2 Vision;
Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 7.2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerContext, LayerInfo, TensorPlan
from forge_core.model import mark
from forge_core.model.dimensions import Dimensions
from forge_core.model.mlp import MLP
from forge_core.model.norm import RMSNorm, build_norm
from forge_vlm.fusions.base import dropped
from forge_vlm.fusions.cross_attention import (
    CrossAttentionFusion,
    own_images,
    seen_images,
    seen_tokens,
)
from forge_vlm.fusions.masks import EXTRAS


class GatedCrossFusion(CrossAttentionFusion):
    """Some blocks of the decoder ask visual tokens; the embedding has rows for tokens that mark an image."""

    def build_block(self, layer: LayerInfo) -> nn.Module | None:
        if layer.index not in self.options.layers:
            return None
        return GatedCrossBlock(layer.model, self.options.before_images == "all")

    def blocks_after(self, layer: LayerInfo) -> Iterable[nn.Module]:
        return ()

    def build_embed(self, layer: LayerInfo) -> nn.Module | None:
        if not self.options.extra_tokens:
            return None
        d = Dimensions.of(layer.model)
        return nn.Embedding(d.vocab_size + self.options.extra_tokens, d.dim)


class GatedCrossBlock(nn.Module):
    """x + tanh(gate) * attention to images(norm(x)), then x + tanh(gate) * mlp(norm(x)).

    A token sees the last image of its document that stands before it, and those that stand right before that
    one. Before the first image a token takes part in the attention alone, see `GatedCrossAttention`; one
    whose document has no image keeps its state.

    Args:
        ahead: tokens before the first image see.
    """

    def __init__(self, model: ModelConfig, ahead: bool = True) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = build_norm(model, model.dim), build_norm(model, model.dim)
        self.cross = GatedCrossAttention(model, ahead)
        self.mlp = MLP(model)
        self.attn_gate, self.mlp_gate = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        for name in ("attn_gate", "mlp_gate"):
            mark(self, name, role="other", init="zeros")
        self.dropout = model.dropout

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        if context.extras.get(EXTRAS, {}).get("features") is None:
            return x
        x = x + self.attn_gate.tanh() * dropped(self, self.cross(self.attn_norm(x), context), context)
        seeing = self.mlp(self.mlp_norm(x), context) * _beside(x, context)
        return x + self.mlp_gate.tanh() * dropped(self, seeing, context)


class GatedCrossAttention(nn.Module):
    """Queries from text, keys and values from visual tokens in groups, norms on queries and keys, no
    positions, and no biases, whatever `model.attention_bias` says.

    Args:
        ahead: tokens before the first image of their document see all of its images, what stands for tiles
            that are not there included: their scores are all masked there, which leaves them all alike.
    """

    def __init__(self, model: ModelConfig, ahead: bool = True) -> None:
        super().__init__()
        self.ahead = ahead
        d = Dimensions.of(model)
        queries, keys = d.n_heads * d.head_dim, d.n_kv_heads * d.head_dim
        self.head_dim, self.grouped = d.head_dim, d.n_heads != d.n_kv_heads
        self.q_proj = nn.Linear(d.dim, queries, bias=False)
        self.k_proj = nn.Linear(d.dim, keys, bias=False)
        self.v_proj = nn.Linear(d.dim, keys, bias=False)
        self.o_proj = mark(nn.Linear(queries, d.dim, bias=False), init="residual")
        self.q_norm = RMSNorm(d.head_dim, model.norm_eps)
        self.k_norm = RMSNorm(d.head_dim, model.norm_eps)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), 0 for tokens that see no image."""
        marks = context.extras[EXTRAS]
        features: Tensor = marks["features"].to(x.dtype)
        sees = last_images(context, marks, x.shape[1], x.device)
        some, tokens = sees.any(-1, keepdim=True), seen_tokens(sees, marks)
        if self.ahead:
            ahead = own_images(context, marks, x.device) & ~some
            tokens = tokens | seen_tokens(ahead, marks, "image_rooms")
            some = some | ahead.any(-1, keepdim=True)
        # a softmax over nothing is not a number on every device: such rows see all, and are then set to 0
        mask = (tokens | ~some)[:, None]
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim))
            for y in (self.q_proj(x), self.k_proj(features), self.v_proj(features))
        )
        q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.grouped)
        result: Tensor = self.o_proj(y.transpose(1, 2).flatten(2) * some)
        return result

    def parallel_plan(self) -> TensorPlan:
        """Each token asks alone, and every rank has all visual tokens."""
        return TensorPlan(sequence="tokens")


def last_images(context: LayerContext, marks: dict[str, Any], length: int, device: torch.device) -> Tensor:
    """Which image slots each of `length` tokens sees, (B, S, M) bool: of those before it in its document the
    last, and the run of neighbours that it ends."""
    seen = seen_images(context, marks, length, device)
    places, documents = marks["image_places"], marks["image_documents"]
    apart = (places.diff(dim=1) > 1) | (documents.diff(dim=1) != 0)
    runs = F.pad(apart.long().cumsum(1), (1, 0))[:, None]
    last = torch.where(seen, runs, -1).amax(-1, keepdim=True)
    return seen & (runs == last)


def _beside(x: Tensor, context: LayerContext) -> Tensor:
    """Which of the tokens x (B, S, D) of this rank see an image, (B, S, 1) bool."""
    documents, part = context.documents, context.part
    length = x.shape[1] if documents is None else documents.shape[1]
    some = last_images(context, context.extras[EXTRAS], length, x.device).any(-1, keepdim=True)
    if length == x.shape[1] or part is None or part.tensor is None:
        return some
    return some.chunk(part.tensor.size(), 1)[part.tensor.get_local_rank()]
