"""How the pictures of a row are kept: squares of one size, or patches of pictures of any size.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from forge_core.data.source import Arrays
from forge_core.errors import DataError
from forge_vlm.data.picture import Footage
from forge_vlm.data.pixels import ClipPixels, Pixels, Shown, size_of
from forge_vlm.geometry import Grid, ImageShape, PackedGeometry, TiledGeometry


class Keeper(Protocol):
    """Keeps the pictures of rows."""

    def empty(self) -> Arrays:
        """Keys of a row without pictures."""
        ...

    def put(self, arrays: Arrays, slot: int, pixels: Shown) -> None:
        """Keep a picture (3, H, W), or a clip, as that of `slot`; slots are filled in order.

        Raises:
            DataError: there is no room, or a clip where frames are images of their own.
        """
        ...

    def pictures(self, arrays: Arrays) -> list[Pixels]:
        """The pictures (3, H, W) of a row, as the encoder takes them; of a clip its frames, without repeats
        that follow one another."""
        ...


class Squares:
    """`pixels` (M, 3, size, size) uint8."""

    def __init__(self, shape: ImageShape) -> None:
        self.shape = shape

    def empty(self) -> Arrays:
        size = self.shape.geometry.size  # type: ignore[union-attr]
        return {"pixels": np.zeros((self.shape.most, 3, size, size), dtype=np.uint8)}

    def put(self, arrays: Arrays, slot: int, pixels: Shown) -> None:
        arrays["pixels"][slot] = still(pixels)

    def pictures(self, arrays: Arrays) -> list[Pixels]:
        return list(arrays["pixels"][arrays["present"]])


class Patches:
    """`patches` (P, 3 * frames * p * p) uint8, those of one picture or clip after those of the one before,
    `grids` (M, 3) int64, how many each has along time, height and width, and `steps` (M,) float32, how far
    the positions of its steps along time are apart."""

    def __init__(self, shape: ImageShape) -> None:
        self.shape = shape

    @property
    def geometry(self) -> PackedGeometry:
        found: PackedGeometry = self.shape.geometry  # type: ignore[assignment]
        return found

    def empty(self) -> Arrays:
        return {
            "patches": np.zeros((self.shape.patches, self.geometry.width), dtype=np.uint8),
            "grids": np.zeros((self.shape.most, 3), dtype=np.int64),
            "steps": np.ones(self.shape.most, dtype=np.float32),
        }

    def put(self, arrays: Arrays, slot: int, pixels: Shown) -> None:
        geometry = self.geometry
        frames = pixels.frames if isinstance(pixels, ClipPixels) else pixels[None]
        cut = patches_of(frames, geometry)
        start = int(arrays["grids"].prod(1).sum())
        if start + len(cut) > self.shape.patches:
            message = f"{start + len(cut)} patches are more than vlm.max_patches = {self.shape.patches}"
            raise DataError(message, "set it higher, or lower the most pixels of an image")
        arrays["patches"][start : start + len(cut)] = cut
        sides = (n // geometry.patch for n in frames.shape[2:])
        arrays["grids"][slot] = -(-len(frames) // geometry.frames), *sides
        if isinstance(pixels, ClipPixels) and geometry.clips is not None and geometry.clips.rate:
            # in the precision in which transformers multiplies: positions are its whole part
            seconds = np.float32(geometry.frames * pixels.seconds)
            arrays["steps"][slot] = np.float32(geometry.clips.rate) * seconds

    def pictures(self, arrays: Arrays) -> list[Pixels]:
        grids = arrays["grids"][arrays["present"]]
        parts = np.split(arrays["patches"], grids.prod(1).cumsum())
        found: list[Pixels] = []
        for part, grid in zip(parts, grids.tolist(), strict=False):
            frames = frames_of(part, grid, self.geometry)
            new = [True, *(not np.array_equal(a, b) for a, b in pairwise(frames))]
            found += [frame for frame, differs in zip(frames, new, strict=True) if differs]
        return found


class Tiles:
    """`tiles` (M, T, 3, size, size) uint8 and `grids` (M, 2) int64, how many tiles an image has along height
    and width; rows of tiles first."""

    def __init__(self, shape: ImageShape) -> None:
        self.shape = shape

    @property
    def geometry(self) -> TiledGeometry:
        found: TiledGeometry = self.shape.geometry  # type: ignore[assignment]
        return found

    def empty(self) -> Arrays:
        size, most = self.geometry.size, self.shape.most
        return {
            "tiles": np.zeros((most, self.geometry.tiles, 3, size, size), dtype=np.uint8),
            "grids": np.zeros((most, 2), dtype=np.int64),
        }

    def put(self, arrays: Arrays, slot: int, pixels: Shown) -> None:
        size, picture = self.geometry.size, still(pixels)
        rows, columns = (n // size for n in picture.shape[1:])
        cut = picture.reshape(3, rows, size, columns, size).transpose(1, 3, 0, 2, 4)
        arrays["tiles"][slot, : rows * columns] = cut.reshape(rows * columns, 3, size, size)
        arrays["grids"][slot] = rows, columns

    def pictures(self, arrays: Arrays) -> list[Pixels]:
        size, found = self.geometry.size, []
        for tiles, (rows, columns) in zip(arrays["tiles"], arrays["grids"], strict=True):
            if rows * columns:
                cut = tiles[: rows * columns].reshape(rows, columns, 3, size, size).transpose(2, 0, 3, 1, 4)
                found.append(cut.reshape(3, rows * size, columns * size))
        return found


def keeper_of(shape: ImageShape) -> Keeper:
    """By the kind of the encoder's geometry."""
    kinds: dict[str, type[Keeper]] = {"square": Squares, "packed": Patches, "tiled": Tiles}
    return kinds[shape.geometry.kind](shape)  # type: ignore[call-arg]


def looks_up(shape: ImageShape) -> bool:
    """Whether samples are laid out by the sizes of their pictures, so that others take other places."""
    return shape.geometry.kind == "packed" or bool(getattr(shape.geometry, "split", False))


def pictures_in(arrays: Arrays, shape: ImageShape) -> list[Pixels]:
    """The pictures (3, H, W) of a row, as the encoder takes them."""
    return keeper_of(shape).pictures(arrays)


def still(pixels: Shown) -> Pixels:
    """A picture.

    Raises:
        DataError: it is a clip.
    """
    if isinstance(pixels, ClipPixels):
        raise DataError("the encoder does not see frames together")
    return pixels


def patches_of(frames: Pixels, geometry: PackedGeometry) -> Pixels:
    """Frames (F, 3, H, W) as patches (N, 3 * frames * p * p), each with its channels one after another and in
    these its frames; the last frame of all stands for those that lack to a whole patch.

    Patches of one step along time stand together, in these squares of `side` x `side` patches, rows of
    squares first, and in each its rows first.
    """
    p, s, reach = geometry.patch, geometry.side, geometry.frames
    steps = -(-len(frames) // reach)
    frames = frames[np.minimum(np.arange(steps * reach), len(frames) - 1)]
    h, w = (n // (p * s) for n in frames.shape[2:])
    squares = frames.reshape(steps, reach, 3, h, s, p, w, s, p).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return np.ascontiguousarray(squares).reshape(steps * h * w * s * s, geometry.width)


def frames_of(patches: Pixels, grid: Sequence[int], geometry: PackedGeometry) -> Pixels:
    """The way back: (F, 3, H, W) of patches (N, 3 * frames * p * p), repeats included."""
    p, s, reach = geometry.patch, geometry.side, geometry.frames
    h, w = (n // s for n in grid[1:])
    squares = patches.reshape(grid[0], h, w, s, s, 3, reach, p, p).transpose(0, 6, 5, 1, 3, 7, 2, 4, 8)
    return np.ascontiguousarray(squares).reshape(grid[0] * reach, 3, h * s * p, w * s * p)


def grids_of(
    name: str,
    images: Sequence[Any],
    shape: ImageShape,
    measure: Callable[[Any], tuple[int, int]] | None,
    lenient: bool = False,
) -> list[Grid]:
    """Patches along time, height and width of each image or clip of a sample; nothing is measured where all
    are of one size. One that cannot be read counts as the smallest until it is read.

    Args:
        name: of the sample, in messages.
        measure: height and width of an image in pixels; None: it is a file.
        lenient: an image that the encoder does not take counts as the smallest, too.

    Raises:
        DataError: an image that the encoder does not take, or more patches than a sequence can hold.
    """
    if shape.geometry.kind != "packed":
        return [(0, 0, 0)] * len(images)
    try:
        found = [_grid(image, shape, measure or size_of, lenient) for image in images]
    except ValueError as error:
        raise DataError(f"{name} has an image of {error}") from error
    total = sum(map(math.prod, found))
    if total > shape.patches:
        what = "a video" if any(map(_length, images)) else "images"
        message = f"{name} has {what} of {total} patches, more than vlm.max_patches = {shape.patches}"
        hint = "set it higher, or lower the most pixels of an image, or the frames of a video"
        raise DataError(message, hint)
    return found


def grid_in(pixels: Shown, shape: ImageShape) -> Grid:
    """Patches along time, height and width of what was prepared; zeros where all are of one size."""
    geometry = shape.geometry
    if not isinstance(geometry, PackedGeometry):
        return 0, 0, 0
    frames = pixels.frames if isinstance(pixels, ClipPixels) else pixels[None]
    height, width = (n // geometry.patch for n in frames.shape[2:])
    return -(-len(frames) // geometry.frames), height, width


def _grid(image: Any, shape: ImageShape, measure: Callable[[Any], tuple[int, int]], lenient: bool) -> Grid:
    try:
        return shape.grid_of(*_measured(image, measure), _length(image))
    except ValueError:
        if not lenient:
            raise
        return shape.grid_of(1, 1, _length(image))


def _length(image: Any) -> int:
    """Frames that are seen together; 0 of an image."""
    return len(image.times) if isinstance(image, Footage) else 0


def _measured(image: Any, measure: Callable[[Any], tuple[int, int]]) -> tuple[int, int]:
    try:
        return measure(image)
    except DataError:
        return 1, 1
