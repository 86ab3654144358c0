"""Vision-language models for Forge: encoders, connectors and four ways of fusing them with any decoder."""

from forge_vlm.version import __version__

__all__ = ["__version__"]
