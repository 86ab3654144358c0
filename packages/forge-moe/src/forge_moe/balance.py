"""What happens after an update: counts over all ranks, and the bias that experts are chosen with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from forge_moe.experts import gradient_scale
from forge_moe.ffn import MoeFFN
from forge_moe.table import MoeConfig


def bias_step(counts: Tensor, rate: float, centred: bool = False) -> Tensor:
    """(..., E) how the bias moves: rate * sign(mean - count) (Wang et al. 2024, algorithm 1).

    Args:
        counts: (..., E) assignments of each expert in one update, all ranks.
        centred: take the mean of the step off, so that the bias does not drift.
    """
    step = torch.sign(counts.mean(-1, keepdim=True) - counts) * rate
    return step - step.mean(-1, keepdim=True) if centred else step


def bias_rate(moe: MoeConfig, step: int, max_steps: int) -> float:
    """The rate of update `step` (from 1) by `moe.bias_schedule`."""
    rate, share = moe.bias_rate or 0.0, step / max_steps
    if moe.bias_schedule == "linear_warmup":
        return rate * min(1.0, 10 * share)
    if moe.bias_schedule == "cosine":
        return rate * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
    return rate


class Balance:
    """Counts of each update over all ranks, and what follows from them.

    Args:
        named: parts with experts that this rank has, by global name, all with as many experts.
        moe: the table.
        max_steps: of the run.
        due: whether an update is logged.
        reduce: adds up a tensor over the ranks that see different tokens, in place; None in one process.
    """

    def __init__(
        self,
        named: Mapping[str, MoeFFN],
        moe: MoeConfig,
        *,
        max_steps: int,
        due: Callable[[int], bool] = lambda _: True,
        reduce: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.names, self.layers, self.moe = list(named), list(named.values()), moe
        self.scales: dict[str, Tensor] = {}
        self.max_steps, self.due, self.reduce = max_steps, due, reduce
        self.last: Tensor | None = None

    @torch.no_grad()
    def after_update(self, step: int, ok: Tensor) -> None:
        """Take the tallies of an update, add them up over ranks, move biases; a refused update moves none."""
        if not self.layers:  # a part of the model without experts
            return
        tallies = torch.stack([layer.tally for layer in self.layers])
        for layer in self.layers:
            layer.tally.zero_()
        moved = bool(self.moe.bias_rate)
        if moved or self.moe.gradient_scaling or self.due(step):
            if self.reduce is not None:
                self.reduce(tallies)
            self.last = tallies
        counts = tallies[:, : self.moe.num_experts]
        if moved:
            steps = bias_step(counts, bias_rate(self.moe, step, self.max_steps), self.moe.bias_centred)
            for layer, change in zip(self.layers, steps * ok, strict=True):
                bias = layer.router.expert_bias
                if bias is not None and layer.training:
                    bias.add_(change.to(bias.dtype))
        if self.moe.gradient_scaling:
            self.scale_gradients(
                {name: gradient_scale(row) for name, row in zip(self.names, counts, strict=True)}
            )

    @torch.no_grad()
    def scale_gradients(self, scales: Mapping[str, Tensor]) -> None:
        """Set by what the gradients of experts are multiplied in the next update: (E,) by name of layer."""
        for name, layer in zip(self.names, self.layers, strict=True):
            held = layer.experts.scale
            if held is not None and name in scales:
                self.scales[name] = scales[name].to(held.device)
                held.copy_(self.scales[name] if layer.ranks is None else layer.ranks.own(self.scales[name]))
