"""Forge: a training system for foundation models that grows by `pip install`."""

from forge_core.version import FORGE_API, __version__

__all__ = ["FORGE_API", "__version__"]
