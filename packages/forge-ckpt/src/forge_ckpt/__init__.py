"""Checkpoints for Forge: synchronous and asynchronous saving, resuming and resharding.

`open_checkpoint(path)` looks into a checkpoint; it is imported, with torch, when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge_ckpt.version import __version__

if TYPE_CHECKING:
    from forge_ckpt.reading import SavedCheckpoint, open_checkpoint

__all__ = ["SavedCheckpoint", "__version__", "open_checkpoint"]


def __getattr__(name: str) -> Any:
    if name not in ("SavedCheckpoint", "open_checkpoint"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from forge_ckpt import reading

    return getattr(reading, name)
