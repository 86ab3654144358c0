"""The routers of this package."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forge_moe.routing import Router, RouterSpec, Routing
from forge_moe.table import ExpertChoiceOptions, SigmoidOptions, SoftmaxOptions

TINY = 1e-20
"""Keeps the sum of chosen scores from being zero (as DeepSeek-V3's own code does)."""


class SoftmaxRouter(Router):
    """The K largest of a softmax over all experts (Shazeer et al. 2017; Fedus et al. 2022)."""

    def __init__(self, spec: RouterSpec, options: SoftmaxOptions) -> None:
        super().__init__(spec)
        self.options = options

    def route(self, logits: Tensor, valid: Tensor | None) -> Routing:
        scores = logits.softmax(-1)
        expert, weight = self.best(self.biased(scores), scores, valid)
        weight = _weights(weight, self.options.renormalise, self.options.scaling)
        return Routing(expert.reshape(-1), weight.reshape(-1), scores, logits)


class SigmoidRouter(Router):
    """Sigmoid scores, groups of experts chosen first (DeepSeek-AI 2024, V3, section 2.1.2)."""

    def __init__(self, spec: RouterSpec, options: SigmoidOptions) -> None:
        super().__init__(spec)
        self.options = options

    def route(self, logits: Tensor, valid: Tensor | None) -> Routing:
        scores = logits.sigmoid()
        choice = self.biased(scores)
        if self.options.n_groups > 1:
            choice = self._in_best_groups(choice)
        expert, weight = self.best(choice, scores, valid)
        weight = _weights(weight, self.options.renormalise, self.options.scaling)
        shares = scores / (scores.sum(-1, keepdim=True) + TINY)
        return Routing(expert.reshape(-1), weight.reshape(-1), shares, logits)

    def _in_best_groups(self, choice: Tensor) -> Tensor:
        """choice (T, E) with -inf for experts outside of the best groups."""
        tokens, experts = choice.shape
        groups = choice.view(tokens, self.options.n_groups, experts // self.options.n_groups)
        value = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
        kept = value.topk(self.options.top_groups, dim=-1).indices
        outside = torch.ones_like(value, dtype=torch.bool).scatter(-1, kept, False)
        return groups.masked_fill(outside[..., None], -math.inf).view(tokens, experts)


class ExpertChoiceRouter(Router):
    """Each expert takes the tokens with its largest probabilities (Zhou et al. 2022).

    It takes ceil(factor * T / E) of T valid tokens, where the factor is `moe.capacity_factor`, or top_k if
    that is 0: then tokens have top_k experts on average. Not causal, see `ExpertChoiceOptions`.
    """

    def __init__(self, spec: RouterSpec, options: ExpertChoiceOptions) -> None:
        super().__init__(spec)
        self.factor = spec.capacity_factor or float(spec.top_k)

    def route(self, logits: Tensor, valid: Tensor | None) -> Routing:
        tokens, experts = logits.shape
        scores = logits.softmax(-1)
        room = min(tokens, math.ceil(self.factor * tokens / experts))
        choice = self.biased(scores)
        if valid is not None:
            choice = choice.masked_fill(~valid[:, None], -math.inf)
        token = choice.topk(room, dim=0).indices.t()
        weight = scores.t().gather(1, token)
        expert = torch.arange(experts, device=logits.device)[:, None].expand(experts, room)
        if valid is not None:
            count = valid.sum()
            taken = torch.minimum(torch.ceil(self.factor * count / experts), count)
            kept = torch.arange(room, device=logits.device) < taken
            expert, weight = expert.masked_fill(~kept, experts), weight * kept
        return Routing(expert.reshape(-1), weight.reshape(-1), scores, logits, token.reshape(-1))


def _weights(weight: Tensor, renormalise: bool, scaling: float) -> Tensor:
    """Chosen scores (T, K) as weights of what experts give."""
    if renormalise:
        weight = weight / (weight.sum(-1, keepdim=True) + TINY)
    return weight if scaling == 1.0 else weight * scaling
