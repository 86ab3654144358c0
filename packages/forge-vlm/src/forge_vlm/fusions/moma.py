"""Modality-aware experts: text and visual tokens have experts of their own (MoMa; Lin et al. 2024).

The experts, routers, losses and their division over ranks are forge-moe's, as its table `[moe]` says.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forge_core.contract import LayerContext, LayerInfo, TensorPlan
from forge_core.model.block import Block
from forge_vlm.fusions.apart import visual
from forge_vlm.fusions.base import Fusion
from forge_vlm.fusions.experts import build_experts, by_modality, has_experts


class MomaFusion(Fusion):
    """Visual tokens stand in the sequence; attention is shared, and layers that `[moe]` names have two groups
    of experts."""

    features_travel = False

    def build_block(self, layer: LayerInfo) -> nn.Module | None:
        if not has_experts(self.session, layer):
            return None
        text, image = (build_experts(self.session, layer) for _ in range(2))
        return Block(layer.model, self.ask("forge_build_mixer", layer), MomaFFN(text, image))


class MomaFFN(nn.Module):
    """`text` and `image`, each a layer of experts that routes the tokens of its modality alone."""

    def __init__(self, text: nn.Module, image: nn.Module) -> None:
        super().__init__()
        self.text, self.image = text, image

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), the residual not added."""
        text, image = by_modality(context, x)
        here = visual(context, x)
        if here is None:
            here = torch.zeros(*x.shape[:2], 1, dtype=torch.bool, device=x.device)
        return torch.where(here, self.image(x, image), self.text(x, text))

    def parallel_plan(self) -> TensorPlan:
        """Each token alone."""
        return TensorPlan(sequence="tokens")
