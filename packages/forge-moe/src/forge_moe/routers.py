"""The routers of this package."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core.loss.attached import attach_loss
from forge_moe.routing import Router, RouterSpec, Routing
from forge_moe.table import ExpertChoiceOptions, SigmoidOptions, SoftmaxOptions

AUXILIARY = "loss/moe_auxiliary"
"""Name of the loss of auxiliary routers, as metrics have it."""
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

    With `auxiliary` two matrices learn from x, of which they change nothing, whether each expert chooses the
    token (Raposo et al. 2024, section 3.5; Lin et al. 2024, MoMa, section 2.4). Outside of training an expert
    has the tokens for which they say so with more than one half.
    """

    def __init__(self, spec: RouterSpec, options: ExpertChoiceOptions) -> None:
        super().__init__(spec)
        self.factor = spec.capacity_factor or float(spec.top_k)
        self.auxiliary = Auxiliary(spec.dim, spec.num_experts) if options.auxiliary else None

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Routing:
        if self.auxiliary is None:
            return super().forward(x, valid)
        with torch.autocast(x.device.type, enabled=False):
            logits, guess = self.logits(x), self.auxiliary(x.detach())
            if not self.training:
                return self._guessed(logits, guess, valid)
            routing = self.route(logits, valid)
            if torch.is_grad_enabled():
                value = auxiliary_loss(guess, routing, valid)
                return routing._replace(weight=attach_loss(routing.weight, value, AUXILIARY, "positions"))
            return routing

    def _guessed(self, logits: Tensor, guess: Tensor, valid: Tensor | None) -> Routing:
        """What `auxiliary` says of each token, (T * E,) assignments."""
        tokens, experts = logits.shape
        chosen = guess > 0
        if valid is not None:
            chosen = chosen & valid[:, None]
        scores = logits.softmax(-1)
        expert = torch.arange(experts, device=logits.device).expand(tokens, experts)
        expert = expert.masked_fill(~chosen, experts)
        token = torch.arange(tokens, device=logits.device).repeat_interleave(experts)
        return Routing(expert.reshape(-1), (scores * chosen).reshape(-1), scores, logits, token)

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


class Auxiliary(nn.Module):
    """x (T, D) -> (T, E), logits of being chosen by each expert."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(dim, dim, bias=False)
        self.out_proj = nn.Linear(dim, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        hidden = F.silu(F.linear(x.to(exact), self.up_proj.weight.to(exact)))
        return F.linear(hidden, self.out_proj.weight.to(exact), self.out_proj.bias.to(exact))


def auxiliary_loss(guess: Tensor, routing: Routing, valid: Tensor | None) -> Tensor:
    """() sum over valid tokens of the mean over experts of the binary cross-entropy of guess (T, E)."""
    assert routing.token is not None
    tokens, experts = guess.shape
    chosen = guess.new_zeros(tokens, experts + 1)
    chosen[routing.token, routing.expert] = 1.0
    each = F.binary_cross_entropy_with_logits(guess, chosen[:, :experts], reduction="none").mean(1)
    return (each if valid is None else each * valid).sum()


def _weights(weight: Tensor, renormalise: bool, scaling: float) -> Tensor:
    """Chosen scores (T, K) as weights of what experts give."""
    if renormalise:
        weight = weight / (weight.sum(-1, keepdim=True) + TINY)
    return weight if scaling == 1.0 else weight * scaling
