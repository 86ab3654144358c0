"""Modality-aware experts: text and visual tokens have experts of their own (MoMa; Lin et al. 2024).

The experts, routers, losses and their division over ranks are forge-moe's, as its table `[moe]` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forge_core.config.tables import RunConfig
from forge_core.contract import LayerContext, LayerInfo, TensorPlan
from forge_core.errors import ForgeError
from forge_core.model.block import Block
from forge_vlm.fusions.base import Fusion
from forge_vlm.fusions.mot import visual

if TYPE_CHECKING:
    from forge_core import TrainingSession


class MomaFusion(Fusion):
    """Visual tokens stand in the sequence; attention is shared, and layers that `[moe]` names have two groups
    of experts."""

    def build_block(self, layer: LayerInfo) -> nn.Module | None:
        from forge_moe.table import MoeConfig, has_experts

        if not has_experts(self.session.config[MoeConfig], layer.index):
            return None
        choice = self.session.config[RunConfig].choose
        mixer = self.session.plugins.choose("forge_build_mixer", choice, session=self.session, layer=layer)
        if mixer is None:
            raise ForgeError(f"nobody answers forge_build_mixer for layer {layer.index}")
        return Block(layer.model, mixer.value, MomaFFN(self.session, layer))


class _Valid:
    """All of a context that experts look at; the compiler cannot make a whole one inside a forward."""

    def __init__(self, valid: Tensor) -> None:
        self.valid = valid


class MomaFFN(nn.Module):
    """`text` and `image`, each a layer of experts that routes the tokens of its modality alone."""

    def __init__(self, session: TrainingSession, layer: LayerInfo) -> None:
        super().__init__()
        from forge_moe.ffn import build_ffn
        from forge_moe.table import MoeConfig

        moe = session.config[MoeConfig]
        self.text = build_ffn(session, layer.model, moe)
        self.image = build_ffn(session, layer.model, moe)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), the residual not added."""
        here = visual(context, x)
        if here is None:
            here = torch.zeros(*x.shape[:2], 1, dtype=torch.bool, device=x.device)
        valid = torch.ones_like(here[..., 0]) if context.valid is None else context.valid[:, -x.shape[1] :]
        text = self.text(x, _Valid(valid & ~here[..., 0]))
        image = self.image(x, _Valid(valid & here[..., 0]))
        return torch.where(here, image, text)

    def parallel_plan(self) -> TensorPlan:
        """Each token alone."""
        return TensorPlan(sequence="tokens")
