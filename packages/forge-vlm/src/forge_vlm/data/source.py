"""Samples of text and images as rows of the core's pipeline. Imports no torch."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from forge_core.data.source import Arrays, SourceSpec
from forge_core.errors import DataError
from forge_core.loss.shift import IGNORE, next_token_targets
from forge_vlm.data.layout import Laid, Part, lay_out
from forge_vlm.data.patches import Keeper, grids_of, keeper_of
from forge_vlm.data.pixels import Pixels
from forge_vlm.geometry import ImageShape, shape_of

_log = logging.getLogger("forge.data")
_NAMED = 3
BLANK = (
    "prompt",
    "image_index",
    "present",
    "image_places",
    "image_documents",
    "unreadable",
)
"""Keys that text alone does not have, beside those of the pictures."""


@attrs.frozen(kw_only=True)
class Sample:
    """One sample.

    Attributes:
        name: in messages.
        laid: its tokens.
        images: what `read` takes, one an image of the sample, those that were cut included.
        patches: of the images that are left, where encoders see them in sizes of their own.
    """

    name: str
    laid: Laid
    images: tuple[Any, ...]
    patches: int = 0


def image_shape(spec: SourceSpec) -> ImageShape:
    """How images enter the sequences of the run that the source is built for.

    Raises:
        DataError: the run has no `[vlm]`.
    """
    if spec.config is None or "vlm" not in spec.config:
        raise DataError(f"{spec.name}: images need a model that sees", "add the table [vlm]")
    return shape_of(spec.config)


def laid_samples(
    spec: SourceSpec,
    shape: ImageShape,
    named: Sequence[tuple[str, Sequence[Part], tuple[Any, ...]]],
    too_long: str = "cut",
    measure: Callable[[Any], tuple[int, int]] | None = None,
) -> list[Sample]:
    """Lay out samples, given as name, parts and images; what is left out is counted and told.

    Args:
        measure: height and width in pixels of what a sample has of an image, where encoders see images in
            sizes of their own; None: that of a file.

    Raises:
        DataError: a sample has more images than a sequence can hold, or is too long where that is an error.
    """
    samples: list[Sample] = []
    cut: list[str] = []
    silent: list[str] = []
    for name, parts, images in named:
        if len(images) > shape.most:
            raise DataError(
                f"{name} has {len(images)} images, more than vlm.max_images = {shape.most}", "set it higher"
            )
        grids = grids_of(name, images, shape, measure)
        places = [shape.places_of(grid) for grid in grids]
        laid = lay_out(parts, places=places, limit=spec.seq_len, eos_id=spec.tokenizer.eos_id)
        if laid.cut:
            if too_long == "error":
                raise DataError(f"{name} does not fit train.seq_len = {spec.seq_len}")
            cut.append(name)
            if too_long == "drop":
                continue
        if not any(laid.learnt):
            silent.append(name)
        patches = sum(grids[number][0] * grids[number][1] for number in laid.images)
        samples.append(Sample(name=name, laid=laid, images=tuple(images), patches=patches))
    how = "left out" if too_long == "drop" else "cut"
    _tell(spec, f"{how}, as they do not fit train.seq_len = {spec.seq_len}", cut, len(named))
    _tell(spec, "without a label, so that nothing is learnt from them", silent, len(named))
    return samples


def _tell(spec: SourceSpec, what: str, names: Sequence[str], total: int) -> None:
    if names:
        some = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        _log.warning("%s: %d of %d samples %s (%s)", spec.name, len(names), total, what, some)


def plan_rows(
    samples: Sequence[Sample], seq_len: int, most: int, pack: bool, patches: int = 0
) -> list[list[int]]:
    """Numbers of the samples of each row: one, or with `pack` neighbours as long as they fit."""
    if not pack:
        return [[number] for number in range(len(samples))]
    rows: list[list[int]] = []
    length = images = cut = 0
    for number, sample in enumerate(samples):
        more, seen = len(sample.laid.tokens), len(sample.laid.images)
        fits = length + more <= seq_len and images + seen <= most and cut + sample.patches <= patches
        if rows and fits:
            rows[-1].append(number)
        else:
            rows.append([number])
            length = images = cut = 0
        length, images, cut = length + more, images + seen, cut + sample.patches
    return rows


class ImageTextSource:
    """A `SampleSource` of rows of text and images, see `forge_vlm.model.Images` for their keys.

    Args:
        spec: what the core says.
        shape: how images enter sequences.
        samples: at least one.
        read: what a sample has of an image -> its pixels.
        about: what else its samples depend on, for the fingerprint.
        pack: several samples a row. mask_unreadable: an image that cannot be read is left out, with all
            labels of its sample, and counted.
    """

    def __init__(
        self,
        spec: SourceSpec,
        shape: ImageShape,
        samples: Sequence[Sample],
        read: Callable[[Any], Pixels],
        *,
        about: str = "",
        pack: bool = False,
        mask_unreadable: bool = False,
    ) -> None:
        self.spec, self.shape, self.samples, self.read = spec, shape, samples, read
        self.rows = plan_rows(samples, spec.seq_len, shape.most, pack, shape.patches)
        self.max_token = max((max(s.laid.tokens, default=0) for s in samples), default=0)
        total = sum(len(s.laid.tokens) for s in samples)
        self.tokens_per_sample = total / max(len(self.rows), 1)
        self._mask_unreadable = mask_unreadable
        self._told: set[str] = set()
        self._about = about

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fingerprint(self) -> str:
        """Changes with the tokens, the names of images, and how they are put into rows."""
        digest = hashlib.blake2b(digest_size=16)
        shape = (self.shape.tokens, self.shape.places, self.shape.most, self.shape.geometry, self.shape.patches)
        digest.update(repr((self._about, shape, self.spec.seq_len, len(self.rows))).encode())
        for sample in self.samples:
            digest.update(repr((sample.laid, [str(image)[:200] for image in sample.images])).encode())
        return digest.hexdigest()

    @property
    def blanks(self) -> Arrays:
        """What a sample without images has of the keys for them."""
        row = Row(self.spec.seq_len, self.shape, 0)
        return {name: row.arrays[name] for name in (*BLANK, *row.keeper.empty())}

    def documents_of(self, index: int) -> list[str]:
        """Names of the samples of a row."""
        return [self.samples[number].name for number in self.rows[index]]

    def __getitem__(self, index: int) -> Arrays:
        """One row."""
        row = Row(self.spec.seq_len, self.shape, self.spec.tokenizer.eos_id)
        for number in self.rows[index]:
            sample = self.samples[number]
            row.add(sample.laid, *self._pixels(sample))
        return row.finish()

    def _pixels(self, sample: Sample) -> tuple[list[Pixels], int]:
        """The images of a sample that are left, and how many cannot be read (then there are none)."""
        found: list[Pixels] = []
        failed = 0
        for number in sample.laid.images:
            try:
                found.append(self.read(sample.images[number]))
            except DataError as error:
                if not self._mask_unreadable:
                    raise DataError(
                        f"{self.spec.name}: {sample.name}: {error.message}", error.hint
                    ) from error
                failed += 1
                if sample.name not in self._told:
                    self._told.add(sample.name)
                    _log.warning("%s: %s is masked: %s", self.spec.name, sample.name, error.message)
        return ([], failed) if failed else (found, 0)


class Row:
    """Arrays of one row, filled sample by sample.

    Args:
        length: S. shape: of images. filler: id of padding.
    """

    def __init__(self, length: int, shape: ImageShape, filler: int) -> None:
        most = shape.most
        self.keeper: Keeper = keeper_of(shape)
        self.filled = self.documents = self.slots = self.visual = 0
        self.labels = np.full(length, IGNORE, dtype=np.int64)
        self.arrays: Arrays = {
            "tokens": np.full(length, filler, dtype=np.int64),
            "positions": np.zeros(length, dtype=np.int64),
            "documents": np.zeros(length, dtype=np.int32),
            "valid": np.zeros(length, dtype=bool),
            "prompt": np.zeros(length, dtype=bool),
            "image_index": np.full(length, -1, dtype=np.int64),
            **self.keeper.empty(),
            "present": np.zeros(most, dtype=bool),
            "image_places": np.zeros(most, dtype=np.int64),
            "image_documents": np.full(most, -1, dtype=np.int32),
            "unreadable": np.zeros((), dtype=np.int64),
        }

    def add(self, laid: Laid, pixels: Sequence[Pixels], unreadable: int = 0) -> None:
        """Append a sample; where images are unreadable, nothing of it is learnt and nothing seen.

        Raises:
            DataError: there is no room for a picture.
        """
        a, start, count = self.arrays, self.filled, len(laid.tokens)
        at = slice(start, start + count)
        tokens, learnt = np.array(laid.tokens, dtype=np.int64), np.array(laid.learnt, dtype=bool)
        a["tokens"][at], a["positions"][at] = tokens, np.arange(count)
        a["documents"][at], a["valid"][at] = self.documents, True
        if unreadable:
            a["unreadable"] += unreadable
        else:
            self.labels[at] = np.where(learnt, tokens, IGNORE)
            index = np.array(laid.index, dtype=np.int64)
            a["image_index"][at] = np.where(index < 0, -1, index + self.visual)
            self.visual += int(np.count_nonzero(index >= 0))
        first = int(learnt.argmax()) if learnt.any() else count
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
        a["targets"] = next_token_targets(self.labels, a["documents"])
        return a
