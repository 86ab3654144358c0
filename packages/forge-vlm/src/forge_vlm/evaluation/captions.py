"""How well the right answers are expected."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from forge_core.loss.shift import IGNORE
from forge_vlm.evaluation.metric import Seen, VlmMetric


class CaptionLoss(VlmMetric):
    """Cross-entropy in nats a token of captions and answers, over samples with an image, and `perplexity`,
    its exponential.

    Unlike `eval/loss` it leaves out what text alone has to say, also in a set that holds both.
    """

    summed = True

    def measure(self, seen: Seen) -> Sequence[float]:
        batch, session = seen.batch, seen.session
        targets = batch["targets"]
        if "present" in batch:
            sees = batch["present"].any(1)
        else:
            sees = torch.zeros(len(targets), dtype=torch.bool)
        seeing = {**batch, "targets": targets.masked_fill(~sees[:, None], IGNORE)}
        found = session.step_fn.evaluate(session, [seeing])
        return found["loss_sum"], found["tokens"]

    def result(self, sums: Sequence[float]) -> dict[str, float]:
        if not sums[1]:
            return {}
        loss = sums[0] / sums[1]
        return {"": loss, "perplexity": math.exp(min(loss, 700.0))}
