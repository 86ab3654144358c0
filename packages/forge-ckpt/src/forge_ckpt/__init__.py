"""Checkpoints for Forge: synchronous and asynchronous saving, resuming and resharding."""

from forge_ckpt.version import __version__

__all__ = ["__version__"]
