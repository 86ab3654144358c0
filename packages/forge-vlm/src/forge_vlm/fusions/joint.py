"""Visual tokens stand in the sequence like text, and one decoder sees both (LLaVA; Liu et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from forge_core.contract import LayerContext
from forge_core.model.masks import Predicate
from forge_vlm.fusions.base import EXTRAS, Fusion


class JointFusion(Fusion):
    """Causal over all tokens; `bidirectional` lets visual tokens or the prompt see later ones among them."""

    def masks(self) -> Iterable[tuple[str, Predicate]]:
        rules = {"none": (), "image": (("or", same_image),), "prefix": (("or", both_prompt),)}
        found: Iterable[tuple[str, Predicate]] = rules[self.options.bidirectional]
        return found


def same_image(context: LayerContext, q: Tensor, k: Tensor) -> Tensor:
    """Whether q (S, 1) and k (1, K) are tokens of one image."""
    block = context.extras.get(EXTRAS, {}).get("image_blocks")
    if block is None:
        return (q == k) & False
    found: Tensor = (block[:, q] == block[:, k]) & (block[:, q] >= 0)
    return found


def both_prompt(context: LayerContext, q: Tensor, k: Tensor) -> Tensor:
    """Whether q (S, 1) and k (1, K) come before the first supervised token, of whatever document."""
    prompt = context.extras.get(EXTRAS, {}).get("prompt")
    if prompt is None:
        return (q == k) & False
    found: Tensor = prompt[:, q] & prompt[:, k]
    return found
