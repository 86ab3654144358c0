"""Optimizers, parameter groups and schedules. Importing the package imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_core.optim.build import build_optimizer
    from forge_core.optim.groups import parameter_groups
    from forge_core.optim.mode import optimizer_mode
    from forge_core.optim.schedules import phased
    from forge_core.optim.skip import HOST_SYNCS, guarded_step, skips_on_device

_HOMES = {
    "HOST_SYNCS": "skip",
    "build_optimizer": "build",
    "guarded_step": "skip",
    "optimizer_mode": "mode",
    "parameter_groups": "groups",
    "phased": "schedules",
    "skips_on_device": "skip",
}

__all__ = [
    "HOST_SYNCS",
    "build_optimizer",
    "guarded_step",
    "optimizer_mode",
    "parameter_groups",
    "phased",
    "skips_on_device",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
