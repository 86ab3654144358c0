"""Experts of forge-moe for each modality, as its table `[moe]` says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.contract import LayerContext, LayerInfo
from forge_vlm.fusions.masks import EXTRAS

if TYPE_CHECKING:
    from forge_core import TrainingSession


class Among:
    """A context in which only some tokens are there; the compiler cannot make a real one inside a forward.

    Args:
        context: all else.
        valid: (B, S) bool, tokens that are routed.
    """

    def __init__(self, context: LayerContext, valid: Tensor) -> None:
        self._context, self.valid = context, valid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def has_experts(session: TrainingSession, layer: LayerInfo) -> bool:
    """Whether `[moe]` is there and names this layer."""
    if "moe" not in session.config:
        return False
    from forge_moe.table import MoeConfig
    from forge_moe.table import has_experts as named

    return named(session.config[MoeConfig], layer.index)


def build_experts(session: TrainingSession, layer: LayerInfo) -> nn.Module:
    """A feed-forward part of experts."""
    from forge_moe.ffn import build_ffn
    from forge_moe.table import MoeConfig

    return build_ffn(session, layer.model, session.config[MoeConfig])


def whole_visual(context: LayerContext) -> Tensor | None:
    """Which tokens of this context rank are visual, (B, S) bool; None: none of them."""
    index = context.extras.get(EXTRAS, {}).get("here")
    if index is None:
        return None
    here: Tensor = index >= 0
    return here if context.part is None else context.part.own(here)


def by_modality(context: LayerContext, x: Tensor) -> tuple[Any, Any]:
    """What the experts for text, and those for visual tokens, are to route of x (B, S, D)."""
    here = whole_visual(context)
    if here is None:
        here = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    valid = torch.ones_like(here) if context.valid is None else context.valid
    return Among(context, valid & ~here), Among(context, valid & here)
