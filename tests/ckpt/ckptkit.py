"""What the tests of checkpoints share: tiny runs that save, die and go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

import forge_ckpt.plugin
from forge_core.contract.runtime import Observer
from forge_core.plugins import Plugins
from forge_core.testing import TinyRun, isolated_plugins, plugin_object, run_tiny, tiny_config


class KilledError(Exception):
    """Stands for a process that ends."""


class Killer(Observer):
    """Ends the run after an update, before anything of that update is saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def step_end(self, session: Any, step: int, result: Any) -> None:
        if step == self.step:
            raise KilledError(f"after update {step}")


def plugins_for(kill: int | None = None, **more: object) -> Plugins:
    """The plugin `checkpoint`, and `test` with whatever hooks a test needs."""
    hooks: dict[str, Any] = dict(more.pop("hooks", {}))  # type: ignore[call-overload]
    observers = list(hooks.pop("observers", ()))
    if kill is not None:
        observers.append(Killer(kill))
    if observers:
        hooks["forge_observers"] = lambda: observers
    return isolated_plugins({"checkpoint": forge_ckpt.plugin, "test": plugin_object(**hooks), **more})


def run(
    folder: Path,
    *flags: str,
    plugins: Plugins | None = None,
    steps: int = 6,
    kill: int | None = None,
    **tables: Any,
) -> TinyRun:
    """A named tiny run in `folder` that saves synchronously every update, unless tables say otherwise."""
    plugins = plugins or plugins_for(kill)
    merged: dict[str, Any] = {
        "run": {"name": "a"},
        "train": {"max_steps": steps},
        "checkpoint": {"interval": 1, "keep_last": 0, "mode": "sync"},
        "test": True,
    }
    for name, table in tables.items():
        below = merged.get(name)
        both = isinstance(below, Mapping) and isinstance(table, Mapping)
        merged[name] = {**below, **table} if both else table  # type: ignore[dict-item]
    return run_tiny(tiny_config(*flags, plugins=plugins, **merged), plugins, folder=folder)


def killed(
    folder: Path, step: int, *flags: str, hooks: Mapping[str, Any] | None = None, **tables: Any
) -> None:
    """A run that dies after update `step`; its last save is of the update before."""
    plugins = plugins_for(kill=step, hooks=hooks or {})
    try:
        run(folder, *flags, plugins=plugins, **tables)
    except KilledError:
        return
    raise AssertionError(f"it was not killed after update {step}")


def moments(result: TinyRun) -> dict[str, Any]:
    """State of every optimizer by parameter and key, and what is in its groups besides parameters."""
    names = {id(p): name for name, p in result.session.freeze.named.items()}
    found: dict[str, Any] = {}
    for name, named in result.session.optimizers.items():
        for parameter, state in named.optimizer.state.items():
            for key, value in state.items():
                found[f"{name}/{names[id(parameter)]}/{key}"] = value
        for group in named.optimizer.param_groups:
            found[f"{name}/{group['name']}"] = {k: v for k, v in group.items() if k != "params"}
    return found


def assert_same_run(one: TinyRun, other: TinyRun) -> None:
    """Bit-equal weights and optimizer state, equal guard, data position and random state."""
    assert_equal_trees(one.weights, other.weights)
    assert_equal_trees(moments(one), moments(other))
    assert one.session.stream.state_dict() == other.session.stream.state_dict()
    assert_equal_trees(one.session.guard.state_dict(), other.session.guard.state_dict())
    assert one.session.tokens_seen == other.session.tokens_seen


def assert_equal_trees(one: Any, other: Any, at: str = "") -> None:
    """Equal in every bit."""
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype, at
        assert one.shape == other.shape, at
        assert one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes(), at
    elif isinstance(one, Mapping):
        assert one.keys() == other.keys(), (at, one.keys() ^ other.keys())
        for key, value in one.items():
            assert_equal_trees(value, other[key], f"{at}/{key}")
    else:
        assert one == other or (one != one and other != other), (at, one, other)


def names(folder: Path) -> list[str]:
    """Checkpoints of the run in `folder`, as `ls` shows them."""
    return sorted(p.name for p in (folder / "a" / "checkpoints").iterdir())
