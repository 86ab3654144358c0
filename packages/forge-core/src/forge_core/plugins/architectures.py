"""Architectures of Hugging Face that anybody here knows, whatever tables a run has. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from forge_core.errors import PluginError
from forge_core.plugins.registry import Plugins

if TYPE_CHECKING:
    from forge_core.contract import Architecture


@attrs.frozen
class Known:
    """One of them: its `model_type`, the plugin that it is from, and how it maps to ours."""

    name: str
    plugin: str
    architecture: Architecture


def known_architectures(plugins: Plugins | None = None) -> list[Known]:
    """Those of the core and of every installed plugin that can be loaded, in order.

    Args:
        plugins: says what is installed; which of them are active does not matter and is not changed.
    """
    from forge_core.commands.loading import blocked_plugins

    blocked = blocked_plugins() if plugins is None else plugins.blocked
    plugins = Plugins(installed=None if plugins is None else plugins.installed, blocked=blocked)
    for name in plugins.names():
        try:
            plugins.load(name)
        except PluginError:
            continue  # nobody asked for it
    answers = plugins.collect("forge_architectures")
    return [Known(c.value[0], c.plugin, c.value[1]) for c in answers]
