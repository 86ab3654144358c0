"""Optimizers that train at one point and evaluate at another (weight averages), all driven the same way."""

from __future__ import annotations

from types import TracebackType

import torch

MODES = ("train", "eval")


class optimizer_mode:  # noqa: N801 - used like a function
    """Let the parameters hold what the optimizer trains at ("train") or what it has to offer ("eval").

    Acts at once; as a context manager it also restores the mode from before. Optimizers with `train()` and
    `eval()` are told, for all others nothing happens. Evaluate, generate and save under "eval"; step under
    "train".

    Args:
        optimizer: any optimizer.
        mode: "train" or "eval".

    Raises:
        ValueError: another mode.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        self.optimizer = optimizer
        self.before = current_mode(optimizer)
        _switch(optimizer, mode)

    def __enter__(self) -> torch.optim.Optimizer:
        return self.optimizer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _switch(self.optimizer, self.before)


def current_mode(optimizer: torch.optim.Optimizer) -> str:
    """The mode that an optimizer is in, from `train_mode` of its groups, where schedule-free ones keep it."""
    return "train" if all(group.get("train_mode", True) for group in optimizer.param_groups) else "eval"


def _switch(optimizer: torch.optim.Optimizer, mode: str) -> None:
    method = getattr(optimizer, mode, None)
    if method is not None:
        method()
