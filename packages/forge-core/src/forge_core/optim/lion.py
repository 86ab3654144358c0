"""Lion: the sign of an interpolated average as the update, one buffer a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forge_core.config.tables import OptimizerConfig
from forge_core.optim.groups import merged
from forge_core.optim.tensors import average_, descend_, gradients, local


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2, with decoupled decay:

        u = sign(b1 m + (1 - b1) g);  p <- p (1 - lr wd) - lr u;  m <- b2 m + (1 - b2) g

    State: `exp_avg`, shaped and typed as the parameter. A parameter without a gradient is neither stepped nor
        decayed.

    Args:
        params: parameters or groups.
        lr: size of every step; good values lie 3 to 10 times under AdamW's.
        betas: (b1, b2), each in [0, 1).
        weight_decay: decoupled.
    """

    forge_skips_on_device = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def init_state(self) -> None:
        """Create the state of every parameter that trains and has none."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._average_of(p)

    def _average_of(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        average: Tensor = state["exp_avg"]
        return average

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; with `found_inf` () = 1.0 none at all, decided on the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            grads = gradients(params, getattr(self, "grad_scale", None))
            averages = [local(self._average_of(p)) for p in params]
            beta1, beta2 = group["betas"]
            signs = torch._foreach_lerp(averages, grads, 1.0 - beta1)
            torch._foreach_sign_(signs)
            descend_(
                [local(p) for p in params],
                signs,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                found_inf=found_inf,
            )
            del signs  # before the next temporary of the same size
            average_(averages, grads, weight=1.0 - beta2, found_inf=found_inf)
        return loss


def build(groups: list[dict[str, Any]], config: OptimizerConfig, options: None) -> Lion:
    """Lion with the rates of `[optimizer]`."""
    return Lion(merged(groups), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
