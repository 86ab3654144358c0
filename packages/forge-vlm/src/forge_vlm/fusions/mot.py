"""Mixture of transformers: weights for each modality, one attention over all (Liang et al. 2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerContext, LayerInfo, TensorPlan
from forge_core.model.attention import Attention
from forge_core.model.block import Block
from forge_core.model.dimensions import Dimensions
from forge_core.model.mlp import MLP
from forge_core.model.norm import RMSNorm, build_norm
from forge_core.model.roles import mark
from forge_core.model.rope import rotate
from forge_vlm.fusions.base import Fusion
from forge_vlm.fusions.experts import build_experts, by_modality, has_experts, silenced, whole_visual

IMAGE = "image_"


class MotFusion(Fusion):
    """Every block has norms, projections and an MLP, or experts, for visual tokens beside those for text.

    Weights for text have the names that a text model gives them. Visual tokens start as they come from the
    connector and pass every block unchanged, since what writes to their residual starts at 0.
    """

    features_travel = False

    def build_block(self, layer: LayerInfo) -> nn.Module:
        if not has_experts(self.session, layer):
            return MotBlock(layer.model, layer.index)
        text, image = (build_experts(self.session, layer) for _ in range(2))
        return MotBlock(layer.model, layer.index, (text, silenced(image)))


class MotBlock(Block):
    """A block whose every weight exists twice.

    Args:
        model, index: of the layer.
        experts: feed-forward parts for text and for visual tokens in place of MLPs.
    """

    def __init__(
        self, model: ModelConfig, index: int, experts: tuple[nn.Module, nn.Module] | None = None
    ) -> None:
        text, image = (MotMLP(model), None) if experts is None else experts
        super().__init__(model, MotAttention(model, index), text)
        self.image_attn_norm = build_norm(model, model.dim)
        self.image_mlp_norm = build_norm(model, model.dim)
        self.image_mlp = image

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), residuals included."""
        here = visual(context, x)
        assert self.attn_norm is not None
        assert self.mlp_norm is not None
        if here is None:
            x = x + self.attn(self.attn_norm(x), context)
            return x + self.mlp(self.mlp_norm(x), context)  # type: ignore[no-any-return]
        x = x + self.attn(torch.where(here, self.image_attn_norm(x), self.attn_norm(x)), context)
        h = torch.where(here, self.image_mlp_norm(x), self.mlp_norm(x))
        if self.image_mlp is None:
            return x + self.mlp(h, context)  # type: ignore[no-any-return]
        text, image = by_modality(context, h)
        return x + torch.where(here, self.image_mlp(h, image), self.mlp(h, text))


class MotAttention(Attention):
    """The core's attention, with projections and norms of queries and keys for each modality."""

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__(model, index)
        d = Dimensions.of(model)
        queries, keys = d.n_heads * d.head_dim, d.n_kv_heads * d.head_dim
        self.image_q_proj = nn.Linear(d.dim, queries, bias=model.attention_bias)
        self.image_k_proj = nn.Linear(d.dim, keys, bias=model.attention_bias)
        self.image_v_proj = nn.Linear(d.dim, keys, bias=model.attention_bias)
        self.image_o_proj = mark(nn.Linear(queries, d.dim, bias=False), init="zeros")
        eps, offset = model.norm_eps, model.norm_unit_offset
        self.image_q_norm = RMSNorm(d.head_dim, eps, offset) if model.qk_norm else None
        self.image_k_norm = RMSNorm(d.head_dim, eps, offset) if model.qk_norm else None

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), the residual not added."""
        here = visual(context, x)
        if here is None:
            return super().forward(x, context)
        rows, length, _ = x.shape
        q, k, v = (self._projected(name, x, here).view(rows, length, -1, self.head_dim) for name in "qkv")
        if self.q_norm is not None and self.k_norm is not None:
            assert self.image_q_norm is not None
            assert self.image_k_norm is not None
            q = torch.where(here[..., None], self.image_q_norm(q), self.q_norm(q))
            k = torch.where(here[..., None], self.image_k_norm(k), self.k_norm(k))
        if context.cos is not None and context.sin is not None:
            q, k = rotate(q, context.cos, context.sin), rotate(k, context.cos, context.sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if context.cache is not None:
            k, v = context.cache[self.index].append(k, v)
        y = self.attend(q, k, v, context.mask, **self.scores).transpose(1, 2).reshape(rows, length, -1)
        # sums, as tensor ranks hold parts of them; there is no bias that would be in both
        result: Tensor = self.o_proj(y * ~here) + self.image_o_proj(y * here)
        return result

    def _projected(self, name: str, x: Tensor, here: Tensor) -> Tensor:
        image, text = getattr(self, f"{IMAGE}{name}_proj"), getattr(self, f"{name}_proj")
        return torch.where(here, image(x), text(x))

    def parallel_plan(self) -> TensorPlan:
        """As the core's, of both modalities."""
        plan = super().parallel_plan()
        return TensorPlan(
            column=(*plan.column, *(IMAGE + name for name in plan.column)),
            row=(*plan.row, *(IMAGE + name for name in plan.row)),
            heads=(*plan.heads, *(IMAGE + name for name in plan.heads)),
            sequence="attend",
        )


class MotMLP(MLP):
    """The core's MLP, once for text and once for visual tokens (`image`)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self.image = MLP(model)
        mark(self.image.down_proj, init="zeros")

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), the residual not added."""
        here = visual(context, x)
        if here is None:
            return super().forward(x, context)
        image: Any = self.image
        result: Tensor = self.down_proj(self._hidden(self, x) * ~here)
        return result + image.down_proj(self._hidden(image, x) * here)  # type: ignore[no-any-return]

    def _hidden(self, mlp: MLP, x: Tensor) -> Tensor:
        up: Tensor = mlp.up_proj(x)
        return self.activation(up) if mlp.gate_proj is None else self.activation(mlp.gate_proj(x)) * up

    def parallel_plan(self) -> TensorPlan:
        """As the core's, of both modalities."""
        plan = super().parallel_plan()
        return TensorPlan(
            column=(*plan.column, *(f"image.{name}" for name in plan.column)),
            row=(*plan.row, *(f"image.{name}" for name in plan.row)),
            sequence="tokens",
        )


def visual(context: LayerContext, x: Tensor) -> Tensor | None:
    """Which of the tokens x (B, S, D) are visual, (B, S, 1) bool; None: none of them."""
    here = whole_visual(context)
    if here is None:
        return None
    part = context.part
    if part is not None and here.shape[1] != x.shape[1] and part.tensor is not None:
        here = here.chunk(part.tensor.size(), 1)[part.tensor.get_local_rank()]
    return here[..., None]
