"""Large pictures as several images: pieces row by row, and the whole behind them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, Self

import attrs
import numpy as np

from forge_core.data.tokenizer import Tokenizer
from forge_core.errors import DataError
from forge_vlm.data.layout import Part
from forge_vlm.data.picture import Frame, by_file
from forge_vlm.data.pixels import Pixels, pillow, size_of
from forge_vlm.geometry import ImageGeometry, ImageShape, around_images
from forge_vlm.geometry_split import arrangement
from forge_vlm.marks import encode_marks

Measure = Callable[[Any], tuple[int, int]]
Arrangement = tuple[int, int]
"""Rows and columns of pieces; (0, 0): the picture is seen as a whole alone."""


@attrs.frozen
class Piece:
    """A piece of a picture, or all of it behind its pieces.

    Attributes:
        picture: what the whole is read from. number: from 0. count: of the picture, itself included.
    """

    picture: Any
    number: int
    count: int

    def __str__(self) -> str:
        part = "whole" if self.number == self.count - 1 else f"piece {self.number + 1} of {self.count - 1}"
        return f"{self.picture}, {part}"

    @property
    def group(self) -> str:
        """What it has in common with other pictures of its file."""
        return str(getattr(self.picture, "group", self.picture))


@attrs.define
class Cutting:
    """Puts the pieces of pictures, and the marks around them, where the pictures stand.

    Attributes:
        geometry: of the encoder, which has `split`. marks: `[vlm.pieces]`. tokenizer: of the run.
    """

    geometry: ImageGeometry
    marks: Any
    tokenizer: Tokenizer

    @classmethod
    def of(cls, config: Any, tokenizer: Tokenizer, shape: ImageShape) -> Self | None:
        """For a run; None where pictures stay whole."""
        geometry = shape.geometry
        if not isinstance(geometry, ImageGeometry) or not geometry.split:
            return None
        return cls(geometry, config.get("vlm").pieces, tokenizer)

    def sample(
        self, parts: Sequence[Part], pictures: Sequence[Any], measure: Measure | None
    ) -> tuple[list[Part], tuple[Any, ...]]:
        """Parts and images of a sample. A picture that cannot be read counts as one image until it is read.

        Args:
            measure: height and width of a picture in pixels; None: it is a file.
        """
        found = [self._measured(picture, measure or size_of) for picture in pictures]
        images: list[Any] = []
        for picture, (rows, columns) in zip(pictures, found, strict=True):
            count = rows * columns + 1
            images += [Piece(picture, number, count) for number in range(count)] if rows else [picture]
        return self.expanded(parts, found), tuple(images)

    def prompt(self, parts: Sequence[Part], shown: Sequence[Any]) -> tuple[list[Part], list[Any]]:
        """Parts and images of a prompt, whose pictures are prepared."""
        size = self.geometry.size
        grids = [(pixels.shape[1] // size, pixels.shape[2] // size) for pixels in shown]
        arrangements = [(0, 0) if grid == (1, 1) else grid for grid in grids]
        images = [image for pixels in shown for image in cut(pixels, self.geometry)]
        return self.expanded(parts, arrangements), images

    def expanded(self, parts: Sequence[Part], arrangements: Sequence[Arrangement]) -> list[Part]:
        """Parts in which each picture, by its number, is its pieces and the whole."""
        starts, count = [], 0
        for rows, columns in arrangements:
            starts.append(count)
            count += rows * columns + 1
        found: list[Part] = []
        for part in parts:
            if part.image is None:
                found.append(part)
                continue
            rows, columns = arrangements[part.image]
            start = starts[part.image]
            whole = attrs.evolve(part, image=start + rows * columns)
            if rows:
                at = len(found)
                while part.joined and at and found[at - 1].joined:
                    at -= 1
                at -= part.joined  # marks of the whole stand before it
                rest = [*found[at:], whole]
                del found[at:]
                found += self._pieces(rows, columns, start)
                found += [attrs.evolve(each, joined=True) for each in rest]
            else:
                found.append(whole)
        return found

    def _pieces(self, rows: int, columns: int, start: int) -> Iterator[Part]:
        """All before the whole: pieces and their marks; `start` is the number of the first."""
        marks, text = self.marks, ""
        for row in range(rows):
            for column in range(columns):
                named = {"{row}": str(row + 1), "{column}": str(column + 1)}
                before = marks.before
                for name, value in named.items():
                    before = before.replace(name, value)
                number = row * columns + column
                yield from self._text(text + before, joined=number > 0)
                yield Part(image=start + number, joined=number > 0 or bool(text + before))
                text = ""
            text = marks.after_row
        yield from self._text(text + marks.after_all, joined=True)

    def _text(self, text: str, joined: bool) -> Iterator[Part]:
        if text:
            ids = self._known.get(text)
            if ids is None:
                ids = self._known[text] = encode_marks(self.tokenizer, text)
            yield Part(ids=ids, joined=joined)

    @cached_property
    def _known(self) -> dict[str, tuple[int, ...]]:
        return {}

    def _measured(self, picture: Any, measure: Measure) -> Arrangement:
        if isinstance(picture, Frame):
            return 0, 0
        try:
            return arrangement(self.geometry, *measure(picture))
        except DataError:
            return 0, 0


def marks_of(config: Any) -> tuple[Any, ...]:
    """What a configuration puts around pictures and their pieces; nothing without `[vlm]`."""
    if config is None or "vlm" not in config:
        return ()
    return around_images(config), config.get("vlm").pieces


def cut(pixels: Pixels, geometry: ImageGeometry) -> list[Pixels]:
    """Pieces (3, size, size), and the whole resized to that, of a picture that is as large as its pieces."""
    size = geometry.size
    if pixels.shape[1:] == (size, size):
        return [pixels]
    rows, columns = (side // size for side in pixels.shape[1:])
    grid = pixels.reshape(3, rows, size, columns, size).transpose(1, 3, 0, 2, 4)
    image = pillow()
    picture = image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    method = getattr(image.Resampling, geometry.resample.upper())
    whole = np.asarray(picture.resize((size, size), resample=method), dtype=np.uint8).transpose(2, 0, 1)
    return [*np.ascontiguousarray(grid).reshape(rows * columns, 3, size, size), np.ascontiguousarray(whole)]


def by_picture(pictures: Sequence[Any]) -> Iterator[list[Any]]:
    """Pieces of one picture that follow one another together, and other pictures as `by_file` has them."""
    for whole, group in groupby(pictures, lambda each: each.picture if isinstance(each, Piece) else None):
        if whole is None:
            yield from by_file(list(group))
        else:
            yield list(group)


def read_pieces(
    read: Callable[[Sequence[Any]], Sequence[Any]], pictures: Sequence[Any], geometry: Any
) -> Sequence[Any]:
    """The pixels of one group of `by_picture`; a picture is read once for all of its pieces.

    Args:
        read: pictures of one file -> the pixels of each.

    Raises:
        DataError: one cannot be read, or has another size than when samples were laid out.
    """
    if not getattr(geometry, "split", False) or isinstance(pictures[0], Frame):
        return read(pictures)
    first = pictures[0]
    piece = first if isinstance(first, Piece) else Piece(first, 0, 1)
    found = cut(read([piece.picture])[0], geometry)
    if len(found) != piece.count:
        raise DataError(f"{piece.picture} has another size than when the run started")
    return [found[each.number] for each in pictures] if piece is first else found
