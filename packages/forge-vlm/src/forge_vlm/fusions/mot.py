"""Mixture of transformers: weights for each modality, one attention over all (Liang et al. 2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerContext, LayerInfo, TensorPlan
from forge_core.model.block import Block
from forge_core.model.mlp import MLP
from forge_core.model.norm import build_norm
from forge_core.model.roles import init_of, mark
from forge_vlm.axes import counted, of_modality
from forge_vlm.fusions.apart import attends, chosen, mixed, twice, visual
from forge_vlm.fusions.base import Fusion, dropped
from forge_vlm.fusions.experts import by_modality

IMAGE = "image_"
NORMS = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
"""Those that a block may have."""
BEHIND = "visual_before"
"""How many visual tokens (B, 1) the prompts of a generation have."""


class MotFusion(Fusion):
    """Every block has norms, projections and a feed-forward part for visual tokens beside those for text,
    whatever mixer and feed-forward part the layer has.

    Weights for text have the names that a text model gives them. Visual tokens start as they come from the
    connector and pass every block unchanged, since what writes to their residual starts at 0. A mixer that is
    no `AttentionMixer` is shared by both modalities. The norm behind the last block is the decoder's own: of
    visual tokens only the last before text leads to a prediction.
    """

    features_travel = False

    def positions(
        self,
        tokens: Tensor,
        images: dict[str, Tensor] | None,
        memory: dict[str, Any],
        inputs: dict[str, Any],
    ) -> Tensor | None:
        if self.options.positions == "sequence" or (images is None and BEHIND not in memory):
            return super().positions(tokens, images, memory, inputs)
        together = counted(tokens, images, inputs)
        if images is None:
            behind: Tensor = memory[BEHIND]
            return together - behind
        index = images["image_index"]
        memory[BEHIND] = (index >= 0).sum(1, keepdim=True)
        return of_modality(together, index)

    def build_block(self, layer: LayerInfo) -> nn.Module:
        mixer = self.ask("forge_build_mixer", layer)
        if attends(mixer):
            mixer = mixed(mixer, silenced(self.ask("forge_build_mixer", layer)))
        ffn = self.ask("forge_build_ffn", layer)
        if type(ffn) is MLP:
            return MotBlock(layer.model, mixer, MotMLP(layer.model))
        return MotBlock(layer.model, mixer, ffn, silenced(self.ask("forge_build_ffn", layer)))


class MotBlock(Block):
    """A block whose every weight exists twice.

    Args:
        model: the resolved table.
        mixer: of both modalities.
        ffn: for text, or for both where `image` is None.
        image: for visual tokens.
    """

    def __init__(
        self, model: ModelConfig, mixer: nn.Module, ffn: nn.Module, image: nn.Module | None = None
    ) -> None:
        super().__init__(model, mixer, ffn)
        for name in NORMS:
            theirs = getattr(self, name)
            setattr(self, IMAGE + name, None if theirs is None else build_norm(model, model.dim))
        self.image_mlp = image

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), residuals included."""
        here = visual(context, x)
        y = self.attn(self._normed("attn_norm", x, here), context)
        x = x + dropped(self, self._normed("attn_post_norm", y, here), context)
        y = self._fed(self._normed("mlp_norm", x, here), here, context)
        return x + dropped(self, self._normed("mlp_post_norm", y, here), context)

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


class MotMLP(MLP):
    """The core's MLP, once for text and once for visual tokens (`image`)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self.image = silenced(MLP(model))

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), the residual not added."""
        here = visual(context, x)
        if here is None:
            return super().forward(x, context)
        image: Any = self.image
        return chosen(here, image.down_proj(self._hidden(image, x)), self.down_proj(self._hidden(self, x)))

    def _hidden(self, mlp: MLP, x: Tensor) -> Tensor:
        up: Tensor = mlp.up_proj(x)
        return self.activation(up) if mlp.gate_proj is None else self.activation(mlp.gate_proj(x)) * up

    def parallel_plan(self) -> TensorPlan:
        """As the core's, of both modalities."""
        return twice(super().parallel_plan())


def silenced(part: nn.Module) -> nn.Module:
    """A part of a block that adds nothing to the residual until it is trained."""
    for module in part.modules():
        for name, _ in module.named_parameters(recurse=False):
            if init_of(module, name) == "residual":
                mark(module, name, init="zeros")
    return part


def copy_text(model: nn.Module) -> nn.Module:
    """Let every weight for visual tokens be that for text, whatever the layout, which both have in common."""
    for block in model.modules():
        if isinstance(block, MotBlock):
            pairs = [(getattr(block, IMAGE + name), getattr(block, name)) for name in NORMS]
            pairs.append((getattr(block.attn, "image", None), block.attn))
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
