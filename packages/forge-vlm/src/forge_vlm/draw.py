"""Pictures in a terminal. Imports no torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
