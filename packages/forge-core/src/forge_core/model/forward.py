"""The forward of the text family: decoder, then the loss fused with the head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from forge_core.config.tables import LossConfig, ModelConfig
from forge_core.contract import Batch, Output
from forge_core.loss import IGNORE, cross_entropy_from_logits

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession


class TextForward:
    """Counts and runs a micro-batch of text.

    Logits exist only where a loss term needs them; otherwise the loss makes them chunk by chunk.
    """

    def __init__(self, session: TrainingSession) -> None:
        config = session.config[LossConfig]
        build = session.component("loss", config.name)
        self.loss = build(config, session.options("loss", config.name))
        self.needs_logits = any(term.needs == "logits" for term in session.loss_terms)
        low = session.compute_dtype in (torch.bfloat16, torch.float16)
        self.autocast = (session.device.type, session.compute_dtype) if low else None
        self.z_loss_weight = config.z_loss_weight
        cap = session.config[ModelConfig].logit_softcap
        self.loss_options: dict[str, Any] = {} if cap is None else {"softcap": cap}

    def count(self, batch: Batch) -> dict[str, int]:
        """Supervised tokens, sequences and positions, on the CPU and without a tensor operation."""
        targets = batch["targets"].numpy()
        supervised = int(np.count_nonzero(targets != IGNORE))
        return {"tokens": supervised, "sequences": len(targets), "positions": targets.size}

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        if self.autocast is None:
            return self._run(model, batch)
        with torch.autocast(*self.autocast):
            return self._run(model, batch)

    def _run(self, model: Any, batch: Batch) -> Output:
        hidden = model(batch["tokens"], positions=batch.get("positions"), documents=batch.get("documents"))
        part = getattr(model, "part", None)
        mine = None if part is None or not part.by_context else part.own_batch(batch)
        targets = (mine or batch)["targets"]
        if self.needs_logits:
            logits = model.logits(hidden)
            loss_sum, token_loss = cross_entropy_from_logits(logits, targets, self.z_loss_weight)
            return Output(loss_sum=loss_sum, token_loss=token_loss, hidden=hidden, logits=logits, batch=mine)
        loss_sum, token_loss = self.loss(hidden, model.head.weight, targets, **self.loss_options)
        return Output(loss_sum=loss_sum, token_loss=token_loss, hidden=hidden, batch=mine)
