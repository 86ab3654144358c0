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
from forge_core.model.dropout import dropout
from forge_core.model.mlp import MLP
from forge_core.model.norm import RMSNorm, build_norm
from forge_core.model.roles import mark
from forge_core.model.rope import rotate
from forge_vlm.fusions.base import Fusion
from forge_vlm.fusions.experts import build_experts, by_modality, has_experts, silenced, whole_visual

IMAGE = "image_"
NORMS = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
"""Those that a block may have."""


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
        for name in NORMS:
            theirs = getattr(self, name)
            setattr(self, IMAGE + name, None if theirs is None else build_norm(model, model.dim))
        self.image_mlp = image

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), residuals included."""
        here = visual(context, x)
        y = self.attn(self._normed("attn_norm", x, here), context)
        x = x + self._dropped(self._normed("attn_post_norm", y, here), context)
        y = self._fed(self._normed("mlp_norm", x, here), here, context)
        return x + self._dropped(self._normed("mlp_post_norm", y, here), context)

    def _normed(self, name: str, x: Tensor, here: Tensor | None) -> Tensor:
        """By the norm of each token's modality; unchanged where blocks have no such norm."""
        text = getattr(self, name)
        if text is None:
            return x
        y: Tensor = text(x)
        return y if here is None else torch.where(here, getattr(self, IMAGE + name)(x), y)

    def _fed(self, x: Tensor, here: Tensor | None, context: LayerContext) -> Tensor:
        if here is None or self.image_mlp is None:
            y: Tensor = self.mlp(x, context)
            return y
        text, image = by_modality(context, x)
        return torch.where(here, self.image_mlp(x, image), self.mlp(x, text))

    def _dropped(self, x: Tensor, context: LayerContext) -> Tensor:
        return dropout(x, self.dropout, self.training, context) if self.dropout else x


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
        widths = (queries, keys) if self.norm_all_heads else (d.head_dim, d.head_dim)
        eps, offset = model.norm_eps, model.norm_unit_offset
        self.image_q_norm = RMSNorm(widths[0], eps, offset) if model.qk_norm else None
        self.image_k_norm = RMSNorm(widths[1], eps, offset) if model.qk_norm else None

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), the residual not added."""
        here = visual(context, x)
        if here is None:
            return super().forward(x, context)
        rows, length, _ = x.shape
        q, k, v = (self._projected(name, x, here) for name in "qkv")
        if self.norm_all_heads:
            q, k = self._normed_apart(q, k, here)
        q, k, v = (y.view(rows, length, -1, self.head_dim) for y in (q, k, v))
        if not self.norm_all_heads:
            q, k = self._normed_apart(q, k, here[..., None])
        if context.cos is not None and context.sin is not None:
            q, k = rotate(q, context.cos, context.sin), rotate(k, context.cos, context.sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if context.cache is not None:
            k, v = context.cache[self.index].append(k, v)
        y = self.attend(q, k, v, context.mask, **self.scores).transpose(1, 2).reshape(rows, length, -1)
        # sums, as tensor ranks hold parts of them; there is no bias that would be in both
        result: Tensor = self.o_proj(y * ~here) + self.image_o_proj(y * here)
        return result

    def _normed_apart(self, q: Tensor, k: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys by the norms of each token's modality, if there are any."""
        if self.image_q_norm is None or self.image_k_norm is None:
            return q, k
        theirs = super()._normed(q, k)
        ours = self.image_q_norm(q), self.image_k_norm(k)
        return torch.where(here, ours[0], theirs[0]), torch.where(here, ours[1], theirs[1])

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
            whole=(*plan.whole, *(IMAGE + name for name in plan.whole)),
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


def copy_text(model: nn.Module) -> nn.Module:
    """Let every weight for visual tokens be that for text, whatever the layout, which both have in common."""
    for block in model.modules():
        if isinstance(block, MotBlock):
            pairs = [(getattr(block, IMAGE + name), getattr(block, name)) for name in NORMS]
            names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
            pairs += [(getattr(block.attn, IMAGE + name), getattr(block.attn, name)) for name in names]
            pairs.append((block.mlp.image if block.image_mlp is None else block.image_mlp, block.mlp))
            for ours, theirs in pairs:
                if ours is not None:
                    _copy(ours, theirs)
    return model


@torch.no_grad()
def _copy(ours: nn.Module, theirs: nn.Module) -> None:
    found = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        parameter.copy_(found[name])


def visual(context: LayerContext, x: Tensor) -> Tensor | None:
    """Which of the tokens x (B, S, D) are visual, (B, S, 1) bool; None: none of them."""
    here = whole_visual(context)
    if here is None:
        return None
    part = context.part
    if part is not None and here.shape[1] != x.shape[1] and part.tensor is not None:
        here = here.chunk(part.tensor.size(), 1)[part.tensor.get_local_rank()]
    return here[..., None]
