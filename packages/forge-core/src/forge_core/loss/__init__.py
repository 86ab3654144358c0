"""The training loss: the label shift, cross-entropy fused with the head, losses attached inside a forward.

Importing the package imports no torch, so that data workers can shift numpy labels without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forge_core.loss.shift import IGNORE, next_token_targets

if TYPE_CHECKING:
    from forge_core.loss.attached import AttachedLosses, attach_loss
    from forge_core.loss.cross_entropy import CrossEntropy, build_cross_entropy, cross_entropy_from_logits
    from forge_core.loss.fused import fused_cross_entropy

_HOMES = {
    "AttachedLosses": "attached",
    "CrossEntropy": "cross_entropy",
    "attach_loss": "attached",
    "build_cross_entropy": "cross_entropy",
    "cross_entropy_from_logits": "cross_entropy",
    "fused_cross_entropy": "fused",
}

__all__ = [
    "IGNORE",
    "AttachedLosses",
    "CrossEntropy",
    "attach_loss",
    "build_cross_entropy",
    "cross_entropy_from_logits",
    "fused_cross_entropy",
    "next_token_targets",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
