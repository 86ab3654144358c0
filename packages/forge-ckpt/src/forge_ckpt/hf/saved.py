"""The weights of one of our checkpoints.

They are those that are evaluated: an optimizer that trains at another point keeps that in its state.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forge_ckpt.hf.weights import Info
from forge_ckpt.reading import SavedCheckpoint

PREFIX = "model/"


class SavedWeights:
    """Parameters of a checkpoint by global name; the optimizer's state and the rest are left alone."""

    def __init__(self, saved: SavedCheckpoint) -> None:
        self.saved = saved

    def names(self) -> Sequence[str]:
        return list(self.saved.index.names(PREFIX))

    def info(self, name: str) -> Info:
        found = self.saved.index.tensors[PREFIX + name]
        return Info(found.dtype, found.shape)

    def read(self, name: str) -> Tensor:
        return self.saved.tensor(PREFIX + name)
