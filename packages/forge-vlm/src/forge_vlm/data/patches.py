"""How the pictures of a row are kept: squares of one size, or patches of pictures of any size.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from forge_core.data.source import Arrays
from forge_core.errors import DataError
from forge_vlm.data.pixels import Pixels, size_of
from forge_vlm.geometry import ImageShape, PackedGeometry, TiledGeometry


class Keeper(Protocol):
    """Keeps the pictures of rows."""

    def empty(self) -> Arrays:
        """Keys of a row without pictures."""
        ...

    def put(self, arrays: Arrays, slot: int, pixels: Pixels) -> None:
        """Keep a picture (3, H, W) as that of `slot`; slots are filled in order.

        Raises:
            DataError: there is no room.
        """
        ...

    def pictures(self, arrays: Arrays) -> list[Pixels]:
        """The pictures (3, H, W) of a row, as the encoder takes them."""
        ...


class Squares:
    """`pixels` (M, 3, size, size) uint8."""

    def __init__(self, shape: ImageShape) -> None:
        self.shape = shape

    def empty(self) -> Arrays:
        size = self.shape.geometry.size  # type: ignore[union-attr]
        return {"pixels": np.zeros((self.shape.most, 3, size, size), dtype=np.uint8)}

    def put(self, arrays: Arrays, slot: int, pixels: Pixels) -> None:
        arrays["pixels"][slot] = pixels

    def pictures(self, arrays: Arrays) -> list[Pixels]:
        return list(arrays["pixels"][arrays["present"]])


class Patches:
    """`patches` (P, 3 * p * p) uint8, those of one picture after those of the one before, and `grids` (M, 2)
    int64, how many each has along height and width."""

    def __init__(self, shape: ImageShape) -> None:
        self.shape = shape

    @property
    def geometry(self) -> PackedGeometry:
        found: PackedGeometry = self.shape.geometry  # type: ignore[assignment]
        return found

    def empty(self) -> Arrays:
        width = 3 * self.geometry.patch**2
        return {
            "patches": np.zeros((self.shape.patches, width), dtype=np.uint8),
            "grids": np.zeros((self.shape.most, 2), dtype=np.int64),
        }

    def put(self, arrays: Arrays, slot: int, pixels: Pixels) -> None:
        cut = patches_of(pixels, self.geometry)
        start = int(arrays["grids"].prod(1).sum())
        if start + len(cut) > self.shape.patches:
            message = f"{start + len(cut)} patches are more than vlm.max_patches = {self.shape.patches}"
            raise DataError(message, "set it higher, or lower the most pixels of an image")
        arrays["patches"][start : start + len(cut)] = cut
        arrays["grids"][slot] = [n // self.geometry.patch for n in pixels.shape[1:]]

    def pictures(self, arrays: Arrays) -> list[Pixels]:
        grids = arrays["grids"][arrays["present"]]
        parts = np.split(arrays["patches"], grids.prod(1).cumsum())
        return [
            picture_of(part, (int(h), int(w)), self.geometry)
            for part, (h, w) in zip(parts, grids, strict=False)
        ]


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

    def put(self, arrays: Arrays, slot: int, pixels: Pixels) -> None:
        size = self.geometry.size
        rows, columns = (n // size for n in pixels.shape[1:])
        cut = pixels.reshape(3, rows, size, columns, size).transpose(1, 3, 0, 2, 4)
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


def pictures_in(arrays: Arrays, shape: ImageShape) -> list[Pixels]:
    """The pictures (3, H, W) of a row, as the encoder takes them."""
    return keeper_of(shape).pictures(arrays)


def patches_of(pixels: Pixels, geometry: PackedGeometry) -> Pixels:
    """A picture (3, H, W) as (N, 3 * p * p), a patch's channels one after another.

    Squares of `side` x `side` patches stand together, rows of squares first, and in each its rows first.
    """
    p, s = geometry.patch, geometry.side
    h, w = (n // (p * s) for n in pixels.shape[1:])
    squares = pixels.reshape(3, h, s, p, w, s, p).transpose(1, 4, 2, 5, 0, 3, 6)
    return np.ascontiguousarray(squares).reshape(h * w * s * s, 3 * p * p)


def picture_of(patches: Pixels, grid: tuple[int, int], geometry: PackedGeometry) -> Pixels:
    """The way back: (3, H, W) of its patches (N, 3 * p * p)."""
    p, s = geometry.patch, geometry.side
    h, w = (n // s for n in grid)
    squares = patches.reshape(h, w, s, s, 3, p, p).transpose(4, 0, 2, 5, 1, 3, 6)
    return np.ascontiguousarray(squares).reshape(3, h * s * p, w * s * p)


def grids_of(
    name: str, images: Sequence[Any], shape: ImageShape, measure: Callable[[Any], tuple[int, int]] | None
) -> list[tuple[int, int]]:
    """Patches along height and width of each image of a sample; nothing is measured where all are of one
    size. One that cannot be read counts as the smallest until it is read.

    Args:
        name: of the sample, in messages.
        measure: height and width of an image in pixels; None: it is a file.

    Raises:
        DataError: an image that the encoder does not take, or more patches than a sequence can hold.
    """
    if shape.geometry.kind != "packed":
        return [(0, 0)] * len(images)
    try:
        found = [shape.grid_of(*_measured(image, measure or size_of)) for image in images]
    except ValueError as error:
        raise DataError(f"{name} has an image of {error}") from error
    total = sum(h * w for h, w in found)
    if total > shape.patches:
        message = f"{name} has images of {total} patches, more than vlm.max_patches = {shape.patches}"
        raise DataError(message, "set it higher, or lower the most pixels of an image")
    return found


def _measured(image: Any, measure: Callable[[Any], tuple[int, int]]) -> tuple[int, int]:
    try:
        return measure(image)
    except DataError:
        return 1, 1
