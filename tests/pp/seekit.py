"""Models that see, for runs under stages: tables, and micro-batches some of which have images."""

from __future__ import annotations

from typing import Any

import torch
from ppkit import Data, Stream

from forge_core.contract import Component
from forge_core.testing import plugin_object
from forge_vlm.fusions.base import Fusion

SIZE, TOKENS, SLOTS = 8, 4, 2
"""Side of an image in pixels, its tokens, and the most images of a row."""
MOE: dict[str, Any] = {"num_experts": 4, "top_k": 2, "expert_hidden_dim": 16}


def seeing(fusion: str, *, frozen: bool = False, **options: Any) -> dict[str, Any]:
    """Tables of a model that sees, over those of `ppkit.BASE`."""
    vit = {"image_size": SIZE, "patch_size": 4, "dim": 16, "n_layers": 1, "n_heads": 2}
    vlm: dict[str, Any] = {"fusion": fusion, "max_images": SLOTS}
    vlm["encoder"] = {"name": "vit", "frozen": frozen, "vit": vit}
    if options:
        vlm[fusion] = options
    return {"vlm": vlm, "pictures": {}}


class Pictures(Stream):
    """Micro-batches of a `Stream`, packed and masked. Of four in a row the first two have images, the second
    of them no target; the third is text alone, and in the fourth every row could have images and none has.

    Args:
        apart: whether images take no place in the sequence.
    """

    def __init__(self, session: Any) -> None:
        super().__init__("packed+masked+unsupervised", session)
        fusion = session.config.get("vlm").fusion
        self.apart = not getattr(session.config.options("vlm", fusion), "in_sequence", True)

    def batch(self, number: int) -> dict[str, Any]:
        batch = super().batch(number)
        if number % 4 == 2:
            return batch
        generator = torch.Generator().manual_seed(10_000 + number)
        present = torch.rand(self.rows, SLOTS, generator=generator) < 0.7
        if number % 4 == 3:
            present[:] = False
        places = torch.tensor([[1, 9]]) + torch.arange(self.rows)[:, None]
        shape = (self.rows, SLOTS, 3, SIZE, SIZE)
        pixels = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        index = torch.full_like(batch["tokens"], -1)
        if not self.apart:
            for row, slot in present.nonzero().tolist():
                at = int(places[row, slot])
                index[row, at : at + TOKENS] = slot * TOKENS + torch.arange(TOKENS)
            batch["targets"][index >= 0] = -100
        return {
            **batch,
            "pixels": pixels * present[..., None, None, None],
            "present": present,
            "image_index": index,
            "image_places": places,
            "image_documents": torch.where(present, batch["documents"].gather(1, places), -1),
            "prompt": torch.arange(batch["tokens"].shape[1]).expand(self.rows, -1) < 6,
        }


class DoubledFusion(Fusion):
    """Visual tokens in the sequence, twice as large; it does not say that no block looks at them."""

    def run(
        self,
        decoder: Any,
        tokens: torch.Tensor,
        index: torch.Tensor | None,
        marks: dict[str, Any],
        inputs: dict[str, Any],
    ) -> torch.Tensor:
        features = marks["features"]
        doubled = None if features is None else 2 * features
        return super().run(decoder, tokens, index, {**marks, "features": doubled}, inputs)


def pictures() -> Any:
    """A plugin whose data are `Pictures`, with a fusion `pictures/doubled`."""
    fusion = Component(
        category="vlm_fusion",
        name="doubled",
        target="seekit:DoubledFusion",
        options="forge_vlm.options:JointOptions",
    )
    return plugin_object(
        forge_build_data=lambda session: Data(Pictures(session), session), forge_components=[fusion]
    )
