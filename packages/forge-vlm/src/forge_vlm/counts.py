"""How much of seeing there is in a batch: what FLOPs are counted by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from forge_core.config import Config
from forge_vlm.geometry import PackedGeometry, TiledGeometry, shape_of
from forge_vlm.options_tiled import GatedCrossOptions
from forge_vlm.table import VlmConfig

if TYPE_CHECKING:
    from forge_core.contract import Batch

Numbers = NDArray[Any]


class PictureCounts:
    """Of the images that are really there.

    `patches`, where images have sizes of their own, or tiles, each of which has one for the whole of it;
    `patch_pairs` of one image, or of one step of a clip; `window_pairs` of one window; `looked_at`, pairs of
    a token and a visual token that it sees, where text looks at images from beside them.
    """

    def __init__(self, config: Config) -> None:
        vlm = config[VlmConfig]
        self.shape = shape_of(config)
        self.window = int(getattr(config.options("vlm.encoder", vlm.encoder.name), "window", 0))
        fusion = config.options("vlm", vlm.fusion)
        self.gated = isinstance(fusion, GatedCrossOptions)
        self.ahead = isinstance(fusion, GatedCrossOptions) and fusion.before_images == "all"

    def __call__(self, batch: Batch) -> dict[str, int]:
        if "present" not in batch:
            return dict.fromkeys(self._names(), 0)
        present: Numbers = batch["present"].numpy()
        geometry, found = self.shape.geometry, {}
        tokens = present * self.shape.tokens
        if isinstance(geometry, PackedGeometry):
            steps, height, width = _sides(batch["grids"].numpy())
            patches = steps * height * width
            tokens = patches // geometry.side**2
            found = {"patches": patches, "patch_pairs": patches * height * width}
            if self.window:
                windows = _squares(height, self.window) * _squares(width, self.window)
                found["window_pairs"] = steps * windows
        if isinstance(geometry, TiledGeometry):
            _, height, width = _sides(batch["grids"].numpy())
            tokens = present * height * width * geometry.each
            found = {"patches": tokens, "patch_pairs": tokens**2}
        counts = {name: int(values.sum()) for name, values in found.items()}
        if not self.shape.places:
            counts["looked_at"] = int((self._looking(batch, present) * tokens).sum())
        return counts

    def _names(self) -> list[str]:
        names = [] if self.shape.geometry.kind == "square" else ["patches", "patch_pairs"]
        names += ["window_pairs"] if self.window and self.shape.geometry.kind == "packed" else []
        return names + ([] if self.shape.places else ["looked_at"])

    def _looking(self, batch: Batch, present: Numbers) -> Numbers:
        """(B, M) how many tokens look at each image: those behind it in its document, of which in gated
        blocks those behind the next that is no neighbour look at that, and those before all at all."""
        length = batch["targets"].shape[1]
        places, owners = batch["image_places"].numpy()[:, None], batch["image_documents"].numpy()[:, None]
        documents = batch["documents"].numpy() if "documents" in batch else np.zeros((1, length), np.int32)
        valid = batch["valid"].numpy() if "valid" in batch else np.ones((1, length), bool)
        own = (owners == documents[..., None]) & present[:, None] & valid[..., None]
        sees = own & (places <= np.arange(length)[None, :, None])
        if self.gated:
            apart = (np.diff(places) > 1) | (np.diff(owners) != 0)
            runs = np.pad(apart.cumsum(-1), ((0, 0), (0, 0), (1, 0)))
            last = np.where(sees, runs, -1).max(-1, keepdims=True)
            some = sees.any(-1, keepdims=True)
            sees &= runs == last
            sees |= own & ~some if self.ahead else False
        looking: Numbers = sees.sum(1)
        return looking


def _sides(grids: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Steps along time, rows and columns, each (B, M), of grids (B, M, 2) or (B, M, 3)."""
    grids = grids.astype(np.int64)
    return grids[..., :-2].prod(-1), grids[..., -2], grids[..., -1]


def _squares(sides: Numbers, window: int) -> Numbers:
    """Sum over the pieces of a side that windows cut of their lengths squared."""
    whole, rest = np.divmod(sides, window)
    squares: Numbers = whole * window**2 + rest**2
    return squares
