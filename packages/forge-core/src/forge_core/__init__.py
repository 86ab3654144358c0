"""Forge: a training system for foundation models that grows by `pip install`.

Names that need torch are imported when they are first used, so that importing `forge_core` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from forge_core.markers import hookimpl
from forge_core.version import FORGE_API, __version__

if TYPE_CHECKING:
    from forge_core.contract import BatchStream, StepFn, StepResult
    from forge_core.loop.accumulate import AccumulateStep, count_step, text_step
    from forge_core.loop.build import build_session, new_session, select_step_fn
    from forge_core.loop.loop import run_training_loop
    from forge_core.loop.run import train
    from forge_core.loop.session import TrainingSession
    from forge_core.loop.twin import frozen_twin
    from forge_core.loop.update import apply_update
    from forge_core.loss.attached import attach_loss

_LAZY = {
    "AccumulateStep": "forge_core.loop.accumulate",
    "BatchStream": "forge_core.contract",
    "StepFn": "forge_core.contract",
    "StepResult": "forge_core.contract",
    "TrainingSession": "forge_core.loop.session",
    "apply_update": "forge_core.loop.update",
    "attach_loss": "forge_core.loss.attached",
    "build_session": "forge_core.loop.build",
    "count_step": "forge_core.loop.accumulate",
    "frozen_twin": "forge_core.loop.twin",
    "new_session": "forge_core.loop.build",
    "run_training_loop": "forge_core.loop.loop",
    "select_step_fn": "forge_core.loop.build",
    "text_step": "forge_core.loop.accumulate",
    "train": "forge_core.loop.run",
}

__all__ = [
    "FORGE_API",
    "AccumulateStep",
    "BatchStream",
    "StepFn",
    "StepResult",
    "TrainingSession",
    "__version__",
    "apply_update",
    "attach_loss",
    "build_session",
    "count_step",
    "frozen_twin",
    "hookimpl",
    "new_session",
    "run_training_loop",
    "select_step_fn",
    "text_step",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'forge_core' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
