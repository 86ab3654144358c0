"""Text asks visual tokens in blocks that start as the identity (after Flamingo; Alayrac et al. 2022)."""

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
from forge_core.model.norm import build_norm
from forge_vlm.fusions.base import Fusion, dropped
from forge_vlm.fusions.masks import EXTRAS


class CrossAttentionFusion(Fusion):
    """A block behind every n-th of the decoder's; visual tokens take no place in the sequence."""

    def blocks_after(self, layer: LayerInfo) -> Iterable[nn.Module]:
        if (layer.index + 1) % self.options.every:
            return ()
        return (CrossBlock(layer.model, self.options.n_heads),)


class CrossBlock(nn.Module):
    """x + attention to images(norm(x)), then x + mlp(norm(x)); what writes to the residual starts at 0.

    A token sees the images of its document that stand before it, all of their tokens.
    """

    def __init__(self, model: ModelConfig, n_heads: int | None = None) -> None:
        super().__init__()
        d = Dimensions.of(model)
        self.attn_norm, self.mlp_norm = build_norm(model, d.dim), build_norm(model, d.dim)
        self.attn = CrossAttention(d.dim, n_heads or d.n_heads)
        self.mlp = MLP(model)
        mark(self.mlp.down_proj, init="zeros")
        self.dropout = model.dropout

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        if context.extras.get(EXTRAS, {}).get("features") is None:
            return x
        x = x + dropped(self, self.attn(self.attn_norm(x), context), context)
        return x + dropped(self, self.mlp(self.mlp_norm(x), context), context)


class CrossAttention(nn.Module):
    """Queries from text, keys and values from visual tokens, without positions, and without biases,
    whatever `model.attention_bias` says."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = mark(nn.Linear(dim, dim, bias=False), init="zeros")

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), 0 for tokens that see no image."""
        marks = context.extras[EXTRAS]
        features: Tensor = marks["features"]
        sees = seen_images(context, marks, x.shape[1], features.device)
        some = sees.any(-1, keepdim=True)
        # a softmax over nothing is not a number on every device: such rows see all, and are then set to 0
        mask = (seen_tokens(sees, marks) | ~some)[:, None]
        features = features.to(x.dtype)
        q, k, v = (
            y.view(*y.shape[:2], self.n_heads, -1).transpose(1, 2)
            for y in (self.q_proj(x), self.k_proj(features), self.v_proj(features))
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = y.transpose(1, 2).flatten(2) * some
        result: Tensor = self.o_proj(y)
        return result

    def parallel_plan(self) -> TensorPlan:
        """Each token asks alone, and every rank has all visual tokens."""
        return TensorPlan(sequence="tokens")


def seen_in(context: LayerContext, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """What the tokens x (B, S, D) see: visual tokens (B, N, D) as precise as x, and which of them each of x
    sees, (B, S, N) bool, all of the images of its document that stand before it. None: there are no images.
    """
    marks = context.extras.get(EXTRAS, {})
    features: Tensor | None = marks.get("features")
    if features is None:
        return None
    sees = seen_images(context, marks, x.shape[1], features.device)
    return features.to(x.dtype), seen_tokens(sees, marks)


def seen_tokens(sees: Tensor, marks: dict[str, Any], by: str = "image_owners") -> Tensor:
    """Which visual tokens, (B, S, N) bool, those see that see these image slots (B, S, M).

    Args:
        by: what says of which slot a token is, see `VisionLanguageModel`.
    """
    owners: Tensor = marks[by]
    at = owners.clamp(min=0)[:, None].expand(-1, sees.shape[1], -1)
    found: Tensor = sees.expand(len(owners), -1, -1).gather(2, at) & (owners >= 0)[:, None]
    return found


def seen_images(context: LayerContext, marks: dict[str, Any], length: int, device: torch.device) -> Tensor:
    """Which image slots each token sees, (B, S, M) bool."""
    cache: Any = context.cache
    part = context.part
    if part is not None and part.by_context:
        at = part.index(length * part.ranks, device)
    else:
        at = torch.arange(length, device=device) + (0 if cache is None else cache.length)
    before: Tensor = marks["image_places"][:, None] <= at[None, :, None]
    return before & own_images(context, marks, device)


def own_images(context: LayerContext, marks: dict[str, Any], device: torch.device) -> Tensor:
    """Which image slots are of the document of each token, (B, S, M) bool; S is 1 where all are of one."""
    documents = context.documents
    # a text that grows is one document, the first
    mine = (
        torch.zeros(1, 1, 1, dtype=torch.int32, device=device) if documents is None else documents[..., None]
    )
    found: Tensor = (marks["image_documents"][:, None] == mine) & marks["present"][:, None]
    return found
