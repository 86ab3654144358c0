"""The plugin kernel: discovery, loading, one fixed order, exactly one answer where one is asked for."""

from forge_core.plugins.architectures import Known, known_architectures
from forge_core.plugins.catalog import PluginCatalog, load_object
from forge_core.plugins.discovery import Candidate, discover
from forge_core.plugins.loading import CORE, Plugin
from forge_core.plugins.registry import Contribution, Plugins, attributed, blame_frames

__all__ = [
    "CORE",
    "Candidate",
    "Contribution",
    "Known",
    "Plugin",
    "PluginCatalog",
    "Plugins",
    "attributed",
    "blame_frames",
    "discover",
    "known_architectures",
    "load_object",
]
