"""Schedule-free AdamW: the `schedulefree` package's, with an evaluation that leaves no trace in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from schedulefree import AdamWScheduleFree

from forge_core.config.tables import OptimizerConfig
from forge_core.optim.groups import merged
from forge_core.optim.options import ScheduleFreeOptions
from forge_core.optim.tensors import is_sharded


class ScheduleFreeAdamW(AdamWScheduleFree):  # type: ignore[misc]
    """Defazio et al., "The Road Less Scheduled" (2024), algorithm 1.

    While training, parameters hold y = (1 - b1) z + b1 x; `eval()` puts the average x there and `train()`
    brings y back. Interpolating back would lose the last bits of y, so `eval()` keeps y itself as state for
    as long as it lasts: neither an evaluation nor a checkpoint saved under it changes the run.

    State: `z`, `exp_avg_sq`, under `eval()` also `y`, shaped and typed as the parameter; numbers of the
    groups: `k`, `weight_sum`, `lr_max`, `scheduled_lr`, `train_mode`. Starts in training mode.
    """

    def init_state(self) -> None:
        """Create the state of every parameter that trains and has none."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad and "z" not in self.state[p]:
                    self.state[p]["z"] = p.detach().clone(memory_format=torch.preserve_format)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)

    @torch.no_grad()
    def _start_here(self) -> None:
        # before the first update z is the parameter, also when weights were loaded after z was made
        for group in self.param_groups:
            for p in group["params"] if group["k"] == 0 else ():
                if p in self.state and "z" in self.state[p]:
                    self.state[p]["z"].copy_(p)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update. In evaluation mode an error."""
        self._start_here()
        loss: float | None = super().step(closure)
        return loss

    def eval(self) -> None:
        """Let the parameters hold the average x."""
        if self.param_groups[0]["train_mode"]:
            self._start_here()
            for p, state in self.state.items():
                if "z" in state:
                    state["y"] = p.detach().clone(memory_format=torch.preserve_format)
        super().eval()
        self._drop_empty()

    @torch.no_grad()
    def train(self) -> None:
        """Let the parameters hold y, bit for bit what they held before `eval()`."""
        super().train()
        for p, state in self.state.items():
            if "y" in state:
                p.copy_(state.pop("y"))
        self._drop_empty()

    def _drop_empty(self) -> None:
        # looking up a parameter without state leaves an empty entry, which would look like state when saved
        for p in [p for p, state in self.state.items() if not state]:
            del self.state[p]


def build(
    groups: list[dict[str, Any]], config: OptimizerConfig, options: ScheduleFreeOptions
) -> ScheduleFreeAdamW:
    """Schedule-free AdamW in training mode; meant for a constant schedule."""
    optimizer = ScheduleFreeAdamW(
        merged(groups),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        warmup_steps=options.warmup_steps,
        r=options.r,
        weight_lr_power=options.weight_lr_power,
        # calls over many tensors take no mix of plain tensors and DTensors
        foreach=not any(is_sharded(p) for group in groups for p in group["params"]),
    )
    optimizer.train()
    return optimizer
