"""Choosing the next token."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from forge_core.errors import ForgeError, UsageError


@attrs.frozen(kw_only=True)
class Sampler:
    """Rules for one token after another.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: keep the k likeliest tokens; None: all.
        top_p: keep the fewest likeliest tokens that reach this probability (Holtzman et al. 2020); None: all.
        generator: source of randomness; None: torch's own.

    Raises:
        UsageError: a value outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature = {self.temperature} is not a number from 0", "0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k = {self.top_k} keeps no token", "at least 1; leave it out to keep all")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p = {self.top_p} is not in (0, 1]", "leave it out to keep all")

    def __call__(self, logits: Tensor) -> Tensor:
        """(B, V) logits of any precision -> (B,) int64 on the same device.

        Raises:
            ForgeError: a row has no finite maximum, as that of a model whose weights have diverged.
        """
        if not bool(logits.amax(-1).isfinite().all()):
            raise ForgeError(
                "the model's scores are not finite, so that no token can be chosen",
                "its weights have diverged: take an earlier checkpoint, or train with a lower optimizer.lr",
            )
        if self.temperature == 0:
            return logits.argmax(-1)
        scores = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k, -1).values[:, -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        probabilities = scores.softmax(-1)
        if self.top_p is not None:
            probabilities = keep_top_p(probabilities, self.top_p)
        if self.generator is not None:
            probabilities = probabilities.to(self.generator.device)
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0].to(logits.device)


def keep_top_p(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero every token before which, in order of likelihood, `top_p` is reached already.

    Args:
        probabilities: (B, V).

    Returns:
        (B, V), not normalised again; the likeliest token always stays.
    """
    ordered, order = probabilities.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered.masked_fill(before >= top_p, 0.0)
    return torch.zeros_like(probabilities).scatter(-1, order, ordered)
