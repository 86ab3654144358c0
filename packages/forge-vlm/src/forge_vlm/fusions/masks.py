"""Who sees later tokens, too."""

from __future__ import annotations

from torch import Tensor

from forge_core.contract import LayerContext
from forge_core.model.masks import Predicate

EXTRAS = "vlm"
"""Under this name a forward's `LayerContext.extras` has what the fusion passes to its modules."""


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


RULES: dict[str, tuple[tuple[str, Predicate], ...]] = {
    "none": (),
    "image": (("or", same_image),),
    "prefix": (("or", both_prompt),),
}
"""Mask predicates by `bidirectional`."""
