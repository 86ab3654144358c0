"""Image files to the pixels that an encoder takes, with Pillow. Imports no torch."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_core.errors import DataError, ForgeError
from forge_vlm.geometry import ImageGeometry

Pixels = NDArray[np.uint8]


def pillow() -> Any:
    """Pillow's `Image` module.

    Raises:
        ForgeError: it is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ForgeError(
            "reading images needs the package 'pillow'", 'pip install "forge-vlm[images]"'
        ) from error
    return Image


def read_pixels(source: str | Path | bytes, geometry: ImageGeometry) -> Pixels:
    """One image file as (3, size, size) uint8.

    Raises:
        DataError: there is no such file, or it is broken; names it.
    """
    image = pillow()
    name = "an image in memory" if isinstance(source, bytes) else str(source)
    try:
        with image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            return prepared(opened if opened.mode == "RGB" else opened.convert("RGB"), geometry)
    except FileNotFoundError as error:
        raise DataError(f"there is no image {name}") from error
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
        raise DataError(f"cannot read the image {name}: {error}") from error


def prepared(picture: Any, geometry: ImageGeometry) -> Pixels:
    """A Pillow image in RGB as (3, size, size) uint8: resized, and cut where the encoder wants it so."""
    size = geometry.size
    method = getattr(pillow().Resampling, geometry.resample.upper())
    if geometry.crop:
        width, height = picture.size
        scale = size / min(width, height)
        shape = (size, int(height * scale)) if width <= height else (int(width * scale), size)
        picture = picture.resize(shape, resample=method)
        left, top = (picture.width - size) // 2, (picture.height - size) // 2
        picture = picture.crop((left, top, left + size, top + size))
    elif picture.size != (size, size):
        picture = picture.resize((size, size), resample=method)
    return np.ascontiguousarray(np.asarray(picture, dtype=np.uint8).transpose(2, 0, 1))
