"""Experts of forge-moe for each modality, as its table `[moe]` says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.contract import LayerContext, LayerInfo
from forge_core.model import mark
from forge_vlm.fusions.masks import EXTRAS

if TYPE_CHECKING:
    from forge_core import TrainingSession


class Valid:
    """All of a context that experts look at; the compiler cannot make a whole one inside a forward.

    Args:
        valid: (B, S) bool, tokens that are routed.
    """

    def __init__(self, valid: Tensor) -> None:
        self.valid = valid


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


def silenced(part: Any) -> nn.Module:
    """A part of experts that gives 0 until it is trained."""
    mark(part.experts, "w_down", role="matrices", init="zeros")
    if part.shared is not None:
        mark(part.shared.down_proj, init="zeros")
    found: nn.Module = part
    return found


def whole_visual(context: LayerContext) -> Tensor | None:
    """Which tokens of this context rank are visual, (B, S) bool; None: none of them."""
    index = context.extras.get(EXTRAS, {}).get("here")
    if index is None:
        return None
    here: Tensor = index >= 0
    return here if context.part is None else context.part.own(here)


def by_modality(context: LayerContext, x: Tensor) -> tuple[Valid, Valid]:
    """What the experts for text, and those for visual tokens, are to route of x (B, S, D)."""
    here = whole_visual(context)
    if here is None:
        here = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    valid = torch.ones_like(here) if context.valid is None else context.valid[:, -here.shape[1] :]
    return Valid(valid & ~here), Valid(valid & here)
