"""Plugins made of objects at hand, seeing nothing of what is installed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from forge_core.markers import PROJECT, hookimpl
from forge_core.plugins import Plugins
from forge_core.version import FORGE_API

MARK = f"{PROJECT}_impl"


def isolated_plugins(plugins: Mapping[str, object] | None = None) -> Plugins:
    """Plugins by name, modules or objects of `plugin_object`, as if only they were installed.

    Naming one in a configuration (`tiny_config(plugins=..., mine={})`) activates it, as always.
    """
    return Plugins.isolated(plugins)


def plugin_object(**hooks: Any) -> SimpleNamespace:
    """A plugin from keyword arguments: `plugin_object(forge_tables=Table, forge_observers=lambda: [Mine()])`.

    A function becomes the implementation of the hook of that name (unless it carries the marker already);
    anything else is the constant answer to it. `forge_api` is the installed one unless given.
    """
    members: dict[str, Any] = {"forge_api": hooks.pop("forge_api", FORGE_API)}
    for name, value in hooks.items():
        members[name] = _implementation(value if inspect.isroutine(value) else _constant(value))
    return SimpleNamespace(**members)


def _implementation(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call if hasattr(function, MARK) else hookimpl(call)


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value
