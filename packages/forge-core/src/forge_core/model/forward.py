"""The forward of the text family: decoder, then the loss fused with the head."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

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
        self.residual = session.param_dtype
        cap = session.config[ModelConfig].logit_softcap
        self.loss_options: dict[str, Any] = {} if cap is None else {"softcap": cap}
        # a decoder of somebody else may not care which tokens are padding
        one = getattr(session.model, "parts", (session.model,))[0]  # of a model that was cut
        takes = inspect.signature(one.forward).parameters
        more = {"valid": "apart", "document_count": "document_count"}
        self.told = ("positions", "documents", *(name for name, taken in more.items() if taken in takes))

    def count(self, batch: Batch) -> dict[str, int]:
        """Supervised tokens, sequences and positions without padding, on the CPU and without a tensor
        operation."""
        targets, valid = batch["targets"].numpy(), batch.get("valid")
        supervised = int(np.count_nonzero(targets != IGNORE))
        positions = targets.size if valid is None else int(np.count_nonzero(valid.numpy()))
        return {"tokens": supervised, "sequences": len(targets), "positions": positions}

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        output = self.part(model, batch, None, last=True)
        assert isinstance(output, Output)
        return output

    def part(
        self, model: nn.Module, batch: Batch, carried: Sequence[Tensor] | None, *, last: bool
    ) -> Output | tuple[Tensor, ...]:
        """Run one part of a model that was cut, see `SplitForward`."""
        if self.autocast is None:
            return self._part(model, batch, carried, last)
        with torch.autocast(*self.autocast):
            return self._part(model, batch, carried, last)

    def carried(self, model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """Hidden states (B, S, D) travel, of the tokens that this rank works on."""
        decoder: Any = model
        rows, length = batch["tokens"].shape
        if decoder.part is not None:
            decoder.part.begin(length, whole=True, cached=False)
            length //= decoder.part.count
        return (torch.empty(rows, length, decoder.config.dim, dtype=self.residual, device="meta"),)

    def unread(self, *, first: bool, last: bool) -> frozenset[str]:
        """See `SplitForward`: tokens are looked up in the first part, and targets compared in the last."""
        here = {"tokens": first, "targets": last}
        return frozenset(name for name, needed in here.items() if not needed)

    def _part(
        self, model: Any, batch: Batch, carried: Sequence[Tensor] | None, last: bool
    ) -> Output | tuple[Tensor, ...]:
        if carried is not None and model.part is not None:  # they do not say how long the whole is
            model.part.begin(batch["tokens"].shape[1], whole=True, cached=False)
        given = self.hidden(model, batch, carried)
        return self._loss(model, batch, given[0]) if last else given

    def hidden(self, model: Any, batch: Batch, carried: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """What a part of the model gives: hidden states (B, S, D), and behind them what else travels."""
        whole = {name: batch[name] for name in self.told if name in batch}
        if "valid" in whole:
            whole["apart"] = True
        if carried is None:
            return (model(batch["tokens"], **whole),)
        return (model(embeds=carried[0], **whole),)

    def _loss(self, model: Any, batch: Batch, hidden: Tensor) -> Output:
        part = getattr(model, "part", None)
        mine = None if part is None or not part.by_context else part.own_batch(batch)
        targets = (mine or batch)["targets"]
        if self.needs_logits:
            logits = model.logits(hidden)
            loss_sum, token_loss = cross_entropy_from_logits(logits, targets, self.z_loss_weight)
            return Output(loss_sum=loss_sum, token_loss=token_loss, hidden=hidden, logits=logits, batch=mine)
        loss_sum, token_loss = self.loss(hidden, model.head.weight, targets, **self.loss_options)
        return Output(loss_sum=loss_sum, token_loss=token_loss, hidden=hidden, batch=mine)
