"""What a router decides, and what every router shares."""

from __future__ import annotations

from typing import NamedTuple

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core.model import mark


@attrs.frozen(kw_only=True)
class RouterSpec:
    """What a router is built for; category "moe_router": `target(spec, options) -> Router`.

    Attributes:
        dim: width of a token. num_experts, top_k: E and K.
        jitter: half-width of the noise that multiplies its input while training.
        bias: whether experts are chosen with a bias that balances their load.
        capacity_factor: of `[moe]`; 0: none is set.
    """

    dim: int
    num_experts: int
    top_k: int
    jitter: float = 0.0
    bias: bool = False
    capacity_factor: float = 0.0


class Routing(NamedTuple):
    """Assignments of T tokens to E experts.

    Attributes:
        expert: (A,) int64, the expert of each assignment; E for none (padding, dropped).
        weight: (A,) what the expert's output is multiplied by, fp32 or better, with a graph.
        scores: (T, E) probabilities, each row sums to 1, with a graph; what the balance loss is made of.
        logits: (T, E), with a graph.
        token: (A,) int64, the token of each assignment. None: A is T * K, and a is of token a // K.
    """

    expert: Tensor
    weight: Tensor
    scores: Tensor
    logits: Tensor
    token: Tensor | None = None


class Router(nn.Module):
    """Logits of each token for each expert, and what follows from them; subclasses say what.

    All arithmetic is in fp32 (fp64 in an fp64 model), whatever the precision of the run: logits of bf16 tell
    near experts apart no more (Fedus et al. 2022, section 2.4).

    Args:
        spec: see `RouterSpec`.
    """

    expert_bias: Tensor | None

    def __init__(self, spec: RouterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.num_experts, spec.dim))
        mark(self, "weight", role="other", init="normal")
        self.register_buffer("expert_bias", torch.empty(spec.num_experts) if spec.bias else None)
        if spec.bias:
            mark(self, "expert_bias", init="zeros")

    def logits(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, E)."""
        exact = torch.promote_types(x.dtype, torch.float32)
        x = x.to(exact)
        if self.training and self.spec.jitter:
            x = x * torch.empty_like(x).uniform_(1 - self.spec.jitter, 1 + self.spec.jitter)
        return F.linear(x, self.weight.to(exact))

    def route(self, logits: Tensor, valid: Tensor | None) -> Routing:
        """Assignments from logits (T, E); tokens that `valid` (T,) denies get none.

        A subclass answers.
        """
        raise NotImplementedError

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Routing:
        """x (T, D) of any precision."""
        with torch.autocast(x.device.type, enabled=False):
            return self.route(self.logits(x), valid)

    def best(self, choice: Tensor, scores: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """The K experts with the largest `choice` (T, E) of each token, and their `scores`: (T, K) each."""
        expert = choice.detach().topk(self.spec.top_k, dim=-1).indices
        weight = scores.gather(-1, expert)
        if valid is not None:
            expert = expert.masked_fill(~valid[:, None], self.spec.num_experts)
            weight = weight * valid[:, None]
        return expert, weight

    def biased(self, scores: Tensor) -> Tensor:
        """Scores (T, E) as experts are chosen by; the bias weighs nothing and gets no gradient."""
        chosen = scores.detach()
        return chosen if self.expert_bias is None else chosen + self.expert_bias.to(chosen.dtype)
