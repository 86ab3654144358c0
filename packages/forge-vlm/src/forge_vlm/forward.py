"""Counting and running a micro-batch of text and images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from forge_core.contract import Batch, Output
from forge_core.loss import IGNORE, cross_entropy_from_logits
from forge_core.model.forward import TextForward
from forge_vlm.model import IMAGE_KEYS


class VlmForward(TextForward):
    """The text family's, with images where the batch has them."""

    def count(self, batch: Batch) -> dict[str, int]:
        """Beside the text's counts: `images`, `visual_tokens`, `unsupervised` (sequences without a label),
        `unreadable` (images that could not be read)."""
        found = super().count(batch)
        targets = batch["targets"].numpy()
        found["unsupervised"] = int(len(targets) - np.count_nonzero((targets != IGNORE).any(axis=1)))
        for name, key in (("images", "present"), ("visual_tokens", "image_index"), ("unreadable",) * 2):
            found[name] = 0
            if key in batch:
                values = batch[key].numpy()
                found[name] = int(values.sum() if key != "image_index" else np.count_nonzero(values >= 0))
        return found

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        if self.autocast is None:
            return self._sum(model, batch)
        with torch.autocast(*self.autocast):
            return self._sum(model, batch)

    def _sum(self, model: Any, batch: Batch) -> Output:
        whole = {name: batch[name] for name in ("positions", "documents", "valid") if name in batch}
        images = {name: batch[name] for name in IMAGE_KEYS if name in batch} or None
        hidden = model(batch["tokens"], images=images, apart="valid" in whole, **whole)
        part = model.part
        mine = None if part is None or not part.by_context else part.own_batch(batch)
        targets = (mine or batch)["targets"]
        if self.needs_logits:
            logits = model.logits(hidden)
            loss_sum, token_loss = cross_entropy_from_logits(logits, targets, self.z_loss_weight)
            return Output(loss_sum=loss_sum, token_loss=token_loss, hidden=hidden, logits=logits, batch=mine)
        loss_sum, token_loss = self.loss(hidden, model.head.weight, targets, **self.loss_options)
        return Output(loss_sum=loss_sum, token_loss=token_loss, hidden=hidden, batch=mine)
