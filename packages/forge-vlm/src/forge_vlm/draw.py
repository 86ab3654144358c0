"""Pictures in a terminal, or in files where there is none. Imports no torch."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_vlm.data.pixels import pillow

SHADES = " .:-=+*#%@"
WIDEST = 24


def draw(pixels: NDArray[np.uint8], widest: int = WIDEST) -> str:
    """A picture (3, H, W) in characters, from dark to bright, two a pixel, at most `widest` pixels wide."""
    gray = pixels.astype(np.float64).mean(axis=0)
    step = max(1, -(-gray.shape[1] // widest))
    height, width = (side // step * step for side in gray.shape)
    small = gray[:height, :width].reshape(height // step, step, width // step, step).mean(axis=(1, 3))
    shades = (small / 256 * len(SHADES)).astype(int)
    return "\n".join("".join(SHADES[shade] * 2 for shade in row).rstrip() for row in shades)


@attrs.define
class Gallery:
    """Shows each picture once, and later its number.

    Attributes:
        folder: for PNG files; None writes none.
        drawn: pictures are drawn, rather than named by their files.
    """

    folder: Path | None
    drawn: bool = attrs.field(factory=lambda: sys.stdout is not None and sys.stdout.isatty())
    _known: dict[bytes, str] = attrs.field(factory=dict, init=False)

    def show(self, pixels: NDArray[np.uint8]) -> str:
        """A picture (3, H, W) as text: drawn, or one line with its size and file.

        Raises:
            OSError: its file cannot be written.
        """
        key = repr(pixels.shape).encode() + pixels.tobytes()
        if key in self._known:
            return self._known[key]
        name = f"picture {len(self._known) + 1}"
        self._known[key] = f"[{name}]"
        if self.drawn:
            return f"[{name}]\n{draw(pixels)}"
        size = f"{pixels.shape[2]} x {pixels.shape[1]} pixels"
        if self.folder is None:
            return f"[{name}: {size}]"
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{len(self._known)}.png"
        pillow().fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(file)
        return f"[{name}: {size}, {file}]"
