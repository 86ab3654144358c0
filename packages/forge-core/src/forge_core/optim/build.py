"""Build an optimizer from its component, ready for the loop and for checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch

from forge_core.config.tables import OptimizerConfig
from forge_core.errors import PluginError
from forge_core.optim.adamw import fresh_state
from forge_core.optim.components import OPTIMIZERS

Builder = Callable[[list[dict[str, Any]], OptimizerConfig, Any], torch.optim.Optimizer]
"""What a component of category "optimizer" is."""

LAYOUT_KEYS = ("param_names", "kind", "name")
"""Keys of a group that say which parameters it holds here, whatever layout a checkpoint came from."""
CONFIGURED_KEYS = ("initial_lr", "weight_decay")
"""Keys of a group that the configuration settles."""

log = logging.getLogger(__name__)


def build_optimizer(
    config: OptimizerConfig, options: Any, groups: list[dict[str, Any]], builder: Builder | None = None
) -> torch.optim.Optimizer:
    """The optimizer over `groups`, with the state of all that trains now in place.

    Loading a state keeps names, `initial_lr` and `weight_decay` of the groups as configured here; a saved
    value that differs is logged. Everything else (moments, counters) comes from the state.

    Args:
        config: the `[optimizer]` table.
        options: the component's own table, or None if it has none.
        groups: from `parameter_groups`.
        builder: the component's target; None takes the core's optimizer called `config.name`.

    Raises:
        KeyError: `builder` is None and the core has no such optimizer.
        PluginError: the component builds no optimizer.
        ValueError: the optimizer left out a parameter, took one twice, or a group lost its `initial_lr`.
    """
    builder = builder or _core_builder(config.name)
    optimizer: Any = builder(groups, config, options)
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise PluginError(f"optimizer {config.name!r} builds {kind}, not a torch.optim.Optimizer")
    _check_covers(optimizer, groups, config.name)
    init_state(optimizer)
    _keep_configured(optimizer)
    return optimizer


def init_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of every parameter that trains, as it is before the first update.

    Otherwise tools that save optimizer state by name run an update of their own to find out what the state
    is, which leaves step counters at 1. Works for optimizers with `init_state()` and torch's Adam and AdamW.
    """
    own = getattr(optimizer, "init_state", None)
    if own is not None:
        own()
    elif isinstance(optimizer, torch.optim.Adam):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad and not optimizer.state[p]:
                    optimizer.state[p] = fresh_state(p, fused=bool(group["fused"]))


def _core_builder(name: str) -> Builder:
    targets = {component.name: component.target for component in OPTIMIZERS}
    if name not in targets:
        raise KeyError(f"the core has no optimizer {name!r}")
    module, _, attribute = targets[name].partition(":")
    builder: Builder = getattr(import_module(module), attribute)
    return builder


def _ids(groups: Iterable[dict[str, Any]]) -> list[int]:
    return sorted(id(p) for group in groups for p in group["params"])


def _check_covers(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], name: str) -> None:
    if _ids(optimizer.param_groups) != _ids(groups):
        raise ValueError(f"optimizer {name}: its groups do not hold each parameter exactly once")
    if any("initial_lr" not in group for group in optimizer.param_groups):
        raise ValueError(f"optimizer {name}: a group has no initial_lr, which the schedule multiplies")


def _keep_configured(optimizer: torch.optim.Optimizer) -> None:
    keys = (*LAYOUT_KEYS, *CONFIGURED_KEYS)
    configured = [{key: group[key] for key in keys if key in group} for group in optimizer.param_groups]

    def restore(loaded: torch.optim.Optimizer) -> None:
        for group, own in zip(loaded.param_groups, configured, strict=True):
            for key in CONFIGURED_KEYS:
                if key in own and group.get(key, own[key]) != own[key]:
                    log.warning(
                        "group %s: %s %g was saved, %g is configured and used",
                        own.get("name"),
                        key,
                        group[key],
                        own[key],
                    )
            group.update(own)

    optimizer.register_load_state_dict_post_hook(restore)
