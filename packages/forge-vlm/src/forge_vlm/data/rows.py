"""Samples to the arrays of a row. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_core.data.source import Arrays, SourceSpec
from forge_core.errors import DataError
from forge_core.loss.shift import IGNORE, next_token_targets
from forge_vlm.data.asked import Asked
from forge_vlm.data.layout import Laid
from forge_vlm.data.patches import Keeper, grid_in, keeper_of
from forge_vlm.data.picture import MEND, Footage, Frame
from forge_vlm.data.pieces import by_picture, read_pieces
from forge_vlm.data.pixels import Shown
from forge_vlm.geometry import ImageShape

_log = logging.getLogger("forge.data")
COUNTED = ("unreadable", "missing", "unreadable_videos", "cut", "left_out")
"""Keys that count what is wrong with a row: images and videos that cannot be read; those of them that are not
there; those of them that are videos; samples that do not fit; samples that were left out before its own."""
BLANK = (
    "prompt",
    "image_index",
    "present",
    "image_places",
    "image_documents",
    *COUNTED,
)
"""Keys that text alone does not have, beside those of the pictures."""
Where = Callable[[str, Sequence[Any]], str]
"""Name and pictures of a sample -> where it is, in words."""
Stretch = tuple[int, int, str]
"""Where something starts that is no text, its tokens, and what it is."""


@attrs.frozen(kw_only=True)
class Sample:
    """One sample.

    Attributes:
        name: in messages.
        parts: see `compacted`. places: positions that each image takes. lay: lays them out.
        tokens, kept: tokens and images that are left of it. largest: of the tokens.
        images: what `read` takes, one an image of the sample, those that were cut included.
        patches: of the images that are left, where encoders see them in sizes of their own.
        asked: what evaluations may ask of it, None: nothing beside its answer.
        cut: it does not fit. silent: it has no label.
        dropped: it is left out. wrong: because it is none.
        left_out: samples right before it that were.
    """

    name: str
    parts: bytes
    places: tuple[int, ...]
    lay: Callable[[bytes, tuple[int, ...]], Laid]
    tokens: int
    kept: int
    largest: int
    images: tuple[Any, ...]
    patches: int = 0
    asked: Asked | None = None
    cut: bool = False
    silent: bool = False
    dropped: bool = False
    wrong: bool = False
    left_out: int = 0

    @property
    def laid(self) -> Laid:
        """Its tokens, laid out again."""
        return self.lay(self.parts, self.places)


class Row:
    """Arrays of one row, filled sample by sample.

    Args:
        length: S. shape: of images. filler: id of padding.
    """

    def __init__(self, length: int, shape: ImageShape, filler: int) -> None:
        most = shape.most
        self.keeper: Keeper = keeper_of(shape)
        self.filled = self.documents = self.slots = self.visual = 0
        self.counts = dict.fromkeys(COUNTED, 0)
        numbers = np.empty((4, length), dtype=np.int64)
        numbers.T[:] = filler, 0, -1, IGNORE
        tokens, positions, index, self.labels = numbers
        self.arrays: Arrays = {
            "tokens": tokens,
            "positions": positions,
            "documents": np.zeros(length, dtype=np.int32),
            "valid": np.zeros(length, dtype=bool),
            "prompt": np.zeros(length, dtype=bool),
            "image_index": index,
            **self.keeper.empty(),
            "present": np.zeros(most, dtype=bool),
            "image_places": np.zeros(most, dtype=np.int64),
            "image_documents": np.full(most, -1, dtype=np.int32),
        }

    def add(
        self,
        laid: Laid,
        pixels: Sequence[Shown],
        unreadable: int = 0,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        """Append a sample; where images are unreadable, nothing of it is learnt and nothing seen.

        Args:
            counts: what is wrong with it, see `COUNTED`.

        Raises:
            DataError: there is no room for a picture.
        """
        a, start, count = self.arrays, self.filled, len(laid.tokens)
        at = slice(start, start + count)
        a["tokens"][at], a["positions"][at] = laid.tokens, np.arange(count)
        a["documents"][at], a["valid"][at] = self.documents, True
        self.counts["unreadable"] += unreadable
        for name, value in (counts or {}).items():
            self.counts[name] += value
        if not unreadable:
            seen = laid.index >= 0
            np.copyto(self.labels[at], laid.tokens, where=laid.learnt)
            np.add(laid.index, self.visual, out=a["image_index"][at], where=seen)
            self.visual += int(np.count_nonzero(seen))
        first = int(laid.learnt.argmax()) if laid.learnt.any() else count
        a["prompt"][start : start + first] = True
        for slot, (picture, position) in enumerate(zip(pixels, laid.positions, strict=False), self.slots):
            self.keeper.put(a, slot, picture)
            a["present"][slot] = True
            a["image_places"][slot], a["image_documents"][slot] = start + position, self.documents
        self.slots += len(pixels)
        self.filled += count
        self.documents += 1

    def finish(self) -> Arrays:
        """All keys; padding is a document of its own."""
        a = self.arrays
        a["documents"][self.filled :] = self.documents
        a["positions"][self.filled :] = np.arange(len(self.labels) - self.filled)
        a |= {name: np.array(count, dtype=np.int64) for name, count in self.counts.items()}
        a["targets"] = next_token_targets(self.labels, a["documents"])
        return a


class RowBuilder:
    """Rows of samples, whose pictures are read when a row is asked for.

    Args:
        spec: of the source. shape: of images.
        read: pictures of one file (see `forge_vlm.data.picture.by_file`) -> the pixels of each.
        mask_unreadable: a picture that cannot be read takes all pictures and labels of its sample away, and
            is counted and told; otherwise it is an error.
        where: says of which sample; None: the source and the name of the sample.
    """

    def __init__(
        self,
        spec: SourceSpec,
        shape: ImageShape,
        read: Callable[[Sequence[Any]], Sequence[Shown]],
        mask_unreadable: bool,
        where: Where | None = None,
    ) -> None:
        self.spec, self.shape, self.read = spec, shape, read
        self._mask_unreadable, self._where = mask_unreadable, where
        self._told: set[str] = set()

    @property
    def blanks(self) -> Arrays:
        """What a sample without images has of the keys for them."""
        row = Row(self.spec.seq_len, self.shape, 0)
        names = (*BLANK, *row.keeper.empty())
        arrays = row.finish()
        return {name: arrays[name] for name in names}

    def __call__(self, samples: Iterable[Sample]) -> Arrays:
        """The row of samples that fit one.

        Raises:
            DataError: a picture that cannot be read, with its sample.
        """
        row = Row(self.spec.seq_len, self.shape, self.spec.tokenizer.eos_id)
        for sample in samples:
            try:
                laid = sample.laid
                found, failed = self._pixels(sample, laid)
                counts = {"cut": int(sample.cut), "left_out": sample.left_out, **self._told_apart(failed)}
                row.add(laid, found, len(failed), counts)
            except DataError as error:
                where = self._where
                place = where(sample.name, sample.images) if where else f"{self.spec.name}: {sample.name}"
                raise DataError(f"{place}: {error.message}", error.hint) from error
        return row.finish()

    @staticmethod
    def _told_apart(failed: Sequence[tuple[Any, DataError]]) -> dict[str, int]:
        return {
            "missing": sum(isinstance(error.__cause__, FileNotFoundError) for _, error in failed),
            "unreadable_videos": sum(isinstance(picture, Frame | Footage) for picture, _ in failed),
        }

    def _pixels(self, sample: Sample, laid: Laid) -> tuple[list[Shown], list[tuple[Any, DataError]]]:
        """The images of a sample that are left, and the files that cannot be read (then there are none).

        Raises:
            DataError: one has another size than when it was laid out; one that cannot be read, where that is
                an error.
        """
        found: list[Shown] = []
        failed: list[tuple[Any, DataError]] = []
        for pictures in by_picture([sample.images[number] for number in laid.images]):
            try:
                found += read_pieces(self.read, pictures, self.shape.geometry)
            except DataError as error:
                if not self._mask_unreadable:
                    raise DataError(error.message, error.hint or MEND) from error
                failed.append((pictures[0], error))
                self._tell_masked(sample, error)
        if not failed:
            failed = self._misfits(sample, laid, found)
        return ([] if failed else found), failed

    def _tell_masked(self, sample: Sample, error: DataError) -> None:
        if sample.name not in self._told:
            self._told.add(sample.name)
            _log.warning("%s: %s is masked: %s", self.spec.name, sample.name, error.message)

    def _misfits(self, sample: Sample, laid: Laid, found: Sequence[Shown]) -> list[tuple[Any, DataError]]:
        """A picture that does not fit its place, among them one that could not be read when the run began.

        Raises:
            DataError: there is one, where that is an error.
        """
        try:
            self._check_places(sample, laid, found)
        except DataError as error:
            if not self._mask_unreadable:
                raise
            self._tell_masked(sample, error)
            return [(sample.images[laid.images[0]], error)]
        return []

    def _check_places(self, sample: Sample, laid: Laid, found: Sequence[Shown]) -> None:
        for number, picture in zip(laid.images, found, strict=True):
            if self.shape.places_of(grid_in(picture, self.shape)) != sample.places[number]:
                raise DataError(
                    f"{sample.images[number]} has another size than when the run started",
                    "leave files alone while a run reads them",
                )


def stretches_of(row: Mapping[str, NDArray[Any]], names: Sequence[str] = ()) -> list[Stretch]:
    """Where the pictures of a row stand, for those who look at it.

    Args:
        names: of the pictures that are left, where they are known.
    """
    present = np.flatnonzero(row["present"])
    index, found = row["image_index"], []
    for number, slot in enumerate(present.tolist()):
        start = int(row["image_places"][slot])
        following = row["image_places"][present[number + 1]] if number + 1 < len(present) else len(index)
        behind = np.flatnonzero(index[start:following] < 0)
        count = int(behind[0]) if len(behind) else int(following) - start
        name = f": {names[number]}" if number < len(names) else ""
        found.append((start, count, f"[image {number + 1} of {len(present)} at {start}{name}]"))
    return found
