"""Counting and running a micro-batch of text and images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from forge_core.contract import Batch
from forge_core.loss import IGNORE
from forge_core.model.forward import TextForward
from forge_vlm.counts import PictureCounts
from forge_vlm.data.rows import COUNTED
from forge_vlm.model import IMAGE_KEYS, PICTURES

if TYPE_CHECKING:
    from forge_core import TrainingSession


class VlmForward(TextForward):
    """The text family's, with images where the batch has them."""

    def __init__(self, session: TrainingSession) -> None:
        super().__init__(session)
        self.pictures = PictureCounts(session.config)

    def count(self, batch: Batch) -> dict[str, int]:
        """Beside the text's counts: `images`, `visual_tokens`, `unsupervised` (sequences without a label),
        what is wrong with rows (`COUNTED`), and those of `PictureCounts`."""
        found = super().count(batch)
        targets = batch["targets"].numpy()
        found["unsupervised"] = int(len(targets) - np.count_nonzero((targets != IGNORE).any(axis=1)))
        keys = {"images": "present", "visual_tokens": "image_index"} | {name: name for name in COUNTED}
        for name, key in keys.items():
            found[name] = 0
            if key in batch:
                values = batch[key].numpy()
                found[name] = int(values.sum() if key != "image_index" else np.count_nonzero(values >= 0))
        return found | self.pictures(batch)

    def carried(self, model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """Hidden states, and what the fusion's blocks see of images."""
        seeing: Any = model
        return (*super().carried(model, batch), *seeing.travelling(_images(batch)))

    def unread(self, *, first: bool, last: bool) -> frozenset[str]:
        """Beside the text's: pixels, which become visual tokens in the first part."""
        return super().unread(first=first, last=last) | frozenset(() if first else PICTURES)

    def hidden(self, model: Any, batch: Batch, carried: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """See `TextForward.hidden`."""
        whole = {name: batch[name] for name in ("positions", "documents", "valid") if name in batch}
        given = model(
            batch["tokens"], images=_images(batch), apart="valid" in whole, carried=carried, **whole
        )
        return given if isinstance(given, tuple) else (given,)


def _images(batch: Batch) -> dict[str, Any] | None:
    return {name: batch[name] for name in IMAGE_KEYS if name in batch} or None
