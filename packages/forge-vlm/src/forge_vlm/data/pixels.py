"""Image files to the pixels that an encoder takes, with Pillow. Imports no torch."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_core.errors import DataError, ForgeError, UsageError
from forge_vlm.geometry import Geometry, ImageGeometry, PackedGeometry, TiledGeometry
from forge_vlm.geometry_split import in_pieces, with_longest

Pixels = NDArray[np.uint8]
_ORIENTATION, _LAST_UPRIGHT = 0x0112, 4
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
_LARGEST = 1 << 27
"""Most pixels of what a picture becomes on the way; a thin one would become a wall."""


@attrs.frozen(eq=False)
class ClipPixels:
    """Frames that are seen together.

    Attributes:
        frames: (F, 3, H, W). seconds: that one of them stands for.
    """

    frames: Pixels
    seconds: float


Shown = Pixels | ClipPixels
"""What one slot of a row takes: a picture (3, H, W), or a clip."""


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


def read_pixels(source: str | Path | bytes, geometry: Geometry) -> Pixels:
    """One image file as (3, H, W) uint8, in the size that the encoder takes.

    Raises:
        DataError: there is no such file, or it is broken; names it.
    """
    with opened_image(source) as opened:
        return prepared(upright(opened), geometry)


def size_of(source: str | Path | bytes) -> tuple[int, int]:
    """Height and width of an image file in pixels; its pixels are not decoded.

    Raises:
        DataError: see `read_pixels`.
    """
    with opened_image(source) as opened:
        turned = orientation_of(opened) > _LAST_UPRIGHT
        return (opened.width, opened.height) if turned else (opened.height, opened.width)


def orientation_of(picture: Any) -> int:
    """What a camera says of how it was held, 1 to 8 (Exif 2.3, tag 0x0112); 1: nothing has to be turned."""
    if "exif" not in picture.info or picture.format == "TIFF":  # Pillow turns these itself
        return 1
    try:
        found = picture.getexif().get(_ORIENTATION, 1)
    except Exception:  # whatever is wrong with it, the picture can be seen
        return 1
    return found if found in _TURNS else 1


def upright(picture: Any) -> Any:
    """An opened Pillow image in RGB as it is meant to be seen: turned as the camera was held, and values of
    16 bits as their upper 8. Where something is transparent, its colour is seen.

    Raises:
        ValueError: values of which nobody knows how bright they are.
    """
    turn = _TURNS.get(orientation_of(picture))
    mode = picture.mode
    if mode.startswith("I;16") or (mode == "I" and picture.format == "PPM"):
        values = np.asarray(picture).astype(np.uint32) >> 8
        picture = pillow().fromarray(values.astype(np.uint8))
    elif mode in ("I", "F"):
        raise ValueError(f"its values are of 32 bits (mode {mode}), and may mean any brightness")
    elif mode == "P" and isinstance(picture.info.get("transparency"), bytes):
        picture = picture.convert("RGBA")
    if picture.mode != "RGB":
        picture = picture.convert("RGB")
    return picture if turn is None else picture.transpose(getattr(pillow().Transpose, turn))


@contextmanager
def opened_image(source: str | Path | bytes) -> Iterator[Any]:
    """An image file, opened by Pillow; what goes wrong inside with it is told by name, too.

    Raises:
        DataError: see `read_pixels`.
    """
    image = pillow()
    name = "an image in memory" if isinstance(source, bytes) else str(source)
    try:
        with image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            yield opened
    except FileNotFoundError as error:
        raise DataError(f"there is no image {name}") from error
    except image.UnidentifiedImageError as error:
        raise DataError(f"cannot read the image {name}: it is of no kind that Pillow knows") from error
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
        raise DataError(f"cannot read the image {name}: {error}") from error


def prepared(picture: Any, geometry: Geometry) -> Pixels:
    """A Pillow image in RGB as (3, H, W) uint8: resized, and cut where the encoder wants it so.

    Raises:
        ValueError: its shape is none that the encoder takes.
    """
    method = getattr(pillow().Resampling, geometry.resample.upper())
    if isinstance(geometry, PackedGeometry):
        return prepared_frame(picture, geometry.grid_of(picture.height, picture.width), geometry)
    if isinstance(geometry, TiledGeometry):
        return _arranged(picture, geometry, method)
    size = geometry.size
    if geometry.pad:
        picture = _on_square(picture, geometry)
    if geometry.longest is not None:
        height, width = with_longest(picture.height, picture.width, geometry.longest)
        picture = picture.resize((width, height), resample=method)
    if geometry.split:
        height, width = in_pieces(picture.height, picture.width, size)
        picture = picture.resize((width, height), resample=method)
        return np.ascontiguousarray(np.asarray(picture, dtype=np.uint8).transpose(2, 0, 1))
    if geometry.crop:
        width, height = picture.size
        short = min(width, height)
        _check_room(picture, size * max(width, height) // short, size)
        # in whole numbers: a factor would lose a pixel where the sides divide
        picture = picture.resize((size * width // short, size * height // short), resample=method)
        left, top = (picture.width - size) // 2, (picture.height - size) // 2
        picture = picture.crop((left, top, left + size, top + size))
    elif picture.size != (size, size):
        picture = picture.resize((size, size), resample=method)
    return np.ascontiguousarray(np.asarray(picture, dtype=np.uint8).transpose(2, 0, 1))


def prepared_frame(picture: Any, grid: tuple[int, int], geometry: PackedGeometry) -> Pixels:
    """A Pillow image in RGB as (3, H, W) uint8, of so many patches along height and width."""
    method = getattr(pillow().Resampling, geometry.resample.upper())
    height, width = (n * geometry.patch for n in grid)
    picture = picture.resize((width, height), resample=method)
    return np.ascontiguousarray(np.asarray(picture, dtype=np.uint8).transpose(2, 0, 1))


def _check_room(picture: Any, width: int, height: int) -> None:
    if width * height > _LARGEST:
        raise ValueError(
            f"{picture.height} x {picture.width} pixels: the encoder would see a stripe of it, by way of "
            f"{height} x {width} pixels"
        )


def _on_square(picture: Any, geometry: ImageGeometry) -> Any:
    """In the middle of a square of the mean colour."""
    side = max(picture.size)
    _check_room(picture, side, side)
    square = pillow().new("RGB", (side, side), tuple(int(part * 255) for part in geometry.mean))
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square


def prepared_array(pixels: Pixels, geometry: Geometry) -> Pixels:
    """An image (3, H, W) as `prepared` makes it; one that has the only size of an encoder already stays as it
    is, unless that sees pictures in pieces.

    Raises:
        UsageError: it is no such array of bytes.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[0] != 3:
        message = f"an image is an array of {pixels.dtype} {tuple(pixels.shape)}"
        raise UsageError(message, "give bytes (uint8) of the shape (3, height, width)")
    whole = isinstance(geometry, ImageGeometry) and not geometry.split
    if whole and pixels.shape[1:] == (geometry.size, geometry.size):  # type: ignore[union-attr]
        return pixels
    return prepared(pillow().fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))), geometry)


def _arranged(picture: Any, geometry: TiledGeometry, method: Any) -> Pixels:
    """In the upper left corner of its arrangement of tiles, black elsewhere."""
    rows, columns = geometry.arrangement_of(picture.height, picture.width)
    height, width = geometry.inside(picture.height, picture.width)
    found = np.zeros((3, rows * geometry.size, columns * geometry.size), dtype=np.uint8)
    resized = np.asarray(picture.resize((width, height), resample=method), dtype=np.uint8)
    found[:, :height, :width] = resized.transpose(2, 0, 1)
    return found
