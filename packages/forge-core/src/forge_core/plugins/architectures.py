"""Architectures of Hugging Face that anybody here knows, whatever tables a run has. Imports no torch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs

from forge_core.errors import PluginError
from forge_core.plugins.answers import check_names
from forge_core.plugins.registry import Contribution, Plugins

if TYPE_CHECKING:
    from forge_core.contract import Architecture


_log = logging.getLogger("forge.plugins")


@attrs.frozen
class Known:
    """One of them: its `model_type`, the plugin that it is from, and how it maps to ours."""

    name: str
    plugin: str
    architecture: Architecture


def known_architectures(plugins: Plugins | None = None) -> list[Known]:
    """Those of the core and of every installed plugin that can be loaded, in order. A plugin that fails when
    asked for its own keeps nobody from those of others: that is told, and it is passed over.

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
    found: list[Contribution] = []
    for implementation in plugins.implementations("forge_architectures"):
        try:
            found += plugins.contributions(implementation)
        except Exception as error:
            if implementation.is_core:
                raise
            what = f"{type(error).__name__}: {error}"
            _log.warning("plugin %s does not give its architectures: %s", implementation.plugin, what)
    check_names("forge_architectures", found)
    return [Known(c.value[0], c.plugin, c.value[1]) for c in found]
