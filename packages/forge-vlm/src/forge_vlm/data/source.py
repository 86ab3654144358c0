"""Samples of text and images as rows of the core's pipeline. Imports no torch."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_core.data.inspection import Contents
from forge_core.data.source import Arrays, SourceSpec
from forge_core.data.wording import counted
from forge_core.errors import DataError
from forge_vlm.data.asked import Asked
from forge_vlm.data.layout import Laid, Part, compacted, lay_out, parts_in
from forge_vlm.data.packing import Size, plan_rows
from forge_vlm.data.patches import grids_of
from forge_vlm.data.pieces import Cutting
from forge_vlm.data.pixels import Shown
from forge_vlm.data.rows import Row as Row
from forge_vlm.data.rows import RowBuilder, Sample, Stretch, Where, stretches_of
from forge_vlm.data.telling import Told, tell_alone
from forge_vlm.geometry import ImageShape, shape_of

_log = logging.getLogger("forge.data")
_KEPT = 1 << 20
"""Tokens whose layout is kept."""
Named = (
    tuple[str, Sequence[Part], tuple[Any, ...]] | tuple[str, Sequence[Part], tuple[Any, ...], Asked | None]
)
"""Name, parts and images of a sample, and what evaluations may ask of it."""


def image_shape(spec: SourceSpec) -> ImageShape:
    """How images enter the sequences of the run that the source is built for.

    Raises:
        DataError: the run has no `[vlm]`.
    """
    if spec.config is None or "vlm" not in spec.config:
        raise DataError(f"{spec.name}: images need a model that sees", "add the table [vlm]")
    return shape_of(spec.config)


class SampleLayout:
    """Lays samples out one by one, and counts those that do not fit and those without a label.

    Args:
        spec: of the source. shape: of images.
        too_long: what becomes of a sample longer than a sequence, see `SampleOptions`.
        measure: height and width in pixels of what a sample has of an image, where encoders see images in
            sizes of their own; None: that of a file.
    """

    def __init__(
        self,
        spec: SourceSpec,
        shape: ImageShape,
        too_long: str = "cut",
        measure: Callable[[Any], tuple[int, int]] | None = None,
    ) -> None:
        self.spec, self.shape, self.too_long, self.measure = spec, shape, too_long, measure
        self.cutting = Cutting.of(spec.config, spec.tokenizer, shape)
        self.total = 0
        self.cut, self.silent = Told(), Told()
        self._laid: dict[tuple[bytes, tuple[int, ...]], Laid] = {}
        self._kept = 0

    def __call__(
        self, name: str, parts: Sequence[Part], images: tuple[Any, ...], asked: Asked | None = None
    ) -> Sample | None:
        """One sample; None if it is left out.

        Raises:
            DataError: it has more images than a sequence can hold, or is too long where that is an error.
        """
        spec, shape = self.spec, self.shape
        self.total += 1
        if self.cutting is not None:
            parts, images = self.cutting.sample(parts, images, self.measure)
        if len(images) > shape.most:
            what = "images" if self.cutting is None else "images and pieces"
            found = counted(len(images), "image", what)
            message = f"{name} has {found}, more than vlm.max_images = {shape.most}"
            raise DataError(message, "set it higher")
        grids = grids_of(name, images, shape, self.measure)
        places = tuple(shape.places_of(grid) for grid in grids)
        content = compacted(parts)
        laid = self.lay(content, places)
        if laid.cut:
            if self.too_long == "error":
                raise DataError(f"{name} does not fit train.seq_len = {spec.seq_len}")
            self.cut.add(name)
            if self.too_long == "drop":
                return None
        if not any(laid.learnt):
            self.silent.add(name)
        patches = sum(math.prod(grids[number]) for number in laid.images)
        return Sample(
            name=name,
            parts=content,
            places=places,
            lay=self.lay,
            tokens=len(laid.tokens),
            kept=len(laid.images),
            # a marker may lie behind the vocabulary: nothing predicts it
            largest=max((token for token in laid.tokens if token != shape.marker), default=0),
            images=tuple(images),
            patches=patches,
            asked=asked,
        )

    def lay(self, content: bytes, places: tuple[int, ...]) -> Laid:
        """`lay_out` of compacted parts; small data sets are laid out once."""
        found = self._laid.get((content, places))
        if found is None:
            found = lay_out(
                parts_in(content),
                places=places,
                limit=self.spec.seq_len,
                eos_id=self.spec.tokenizer.eos_id,
                marker=self.shape.marker,
            )
            self._kept += len(found.tokens)
            if self._kept > _KEPT:
                self._laid, self._kept = {}, len(found.tokens)
            self._laid[content, places] = found
        return found

    def tell(self) -> None:
        """What was counted, to the log."""
        how = "left out" if self.too_long == "drop" else "cut"
        for what, told in (
            (f"{how}, as they do not fit train.seq_len = {self.spec.seq_len}", self.cut),
            ("without a label, so that nothing is learnt from them", self.silent),
        ):
            if told.count:
                _log.warning(
                    "%s: %d of %s %s (%s)",
                    self.spec.name,
                    told.count,
                    counted(self.total, "sample"),
                    what,
                    told,
                )


def laid_samples(
    spec: SourceSpec,
    shape: ImageShape,
    named: Iterable[Named],
    too_long: str = "cut",
    measure: Callable[[Any], tuple[int, int]] | None = None,
) -> list[Sample]:
    """Lay out samples, given as name, parts and images; what is left out is counted and told.

    Args, errors: see `SampleLayout`.
    """
    lay = SampleLayout(spec, shape, too_long, measure)
    samples = [sample for each in named if (sample := lay(*each)) is not None]
    lay.tell()
    return samples


def packing_of(spec: SourceSpec, pack: bool) -> str | None:
    """How samples share rows, see `plan_rows`."""
    if not pack:
        return None
    return "best_fit" if spec.packing == "best_fit" else "neighbours"


def size_of(sample: Sample) -> Size:
    """What it takes of a row."""
    return sample.tokens, sample.kept, sample.patches


class ImageTextSource:
    """A `SampleSource` of rows of text and images, see `forge_vlm.model.Images` for their keys.

    Args:
        spec: what the core says.
        shape: how images enter sequences.
        samples: at least one.
        read: see `RowBuilder`.
        about: what else its samples depend on, for the fingerprint.
        left_out: samples that do not fit. where: see `RowBuilder`.
        pack: several samples a row. mask_unreadable: an image that cannot be read is left out, with all
            labels of its sample, and counted.
    """

    def __init__(
        self,
        spec: SourceSpec,
        shape: ImageShape,
        samples: Sequence[Sample],
        read: Callable[[Sequence[Any]], Sequence[Shown]],
        *,
        about: str = "",
        pack: bool = False,
        mask_unreadable: bool = False,
        left_out: int = 0,
        where: Where | None = None,
    ) -> None:
        self.spec, self.shape, self.samples = spec, shape, samples
        self.build = RowBuilder(spec, shape, read, mask_unreadable, where)
        self._left_out = left_out
        most = (spec.seq_len, shape.most, shape.patches)
        self._packing = packing_of(spec, pack)
        if pack and sum(each.kept > 0 for each in samples) > 1:
            tell_alone(spec, shape)
        self.rows = plan_rows([size_of(each) for each in samples], most, self._packing)
        self.max_token = max((sample.largest for sample in samples), default=0)
        total = sum(sample.tokens for sample in samples)
        self.tokens_per_sample = total / max(len(self.rows), 1)
        self._about = about

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fingerprint(self) -> str:
        """Changes with the tokens, the names of images, and how they are put into rows."""
        digest = hashlib.blake2b(digest_size=16)
        shape = (
            self.shape.tokens,
            self.shape.places,
            self.shape.most,
            self.shape.geometry,
            self.shape.patches,
        )
        digest.update(repr((self._about, shape, self.spec.seq_len, len(self.rows), self._packing)).encode())
        for sample in self.samples:
            digest.update(sample.parts)
            digest.update(repr((sample.places, [str(image)[:200] for image in sample.images])).encode())
        return digest.hexdigest()

    @property
    def blanks(self) -> Arrays:
        """What a sample without images has of the keys for them."""
        return self.build.blanks

    def documents_of(self, index: int) -> list[str]:
        """Names of the samples of a row."""
        return [self.samples[number].name for number in self.rows[index]]

    def contents(self) -> Contents:
        """What `forge data inspect` shows; lays all samples out again."""
        laid = [each.laid for each in self.samples]
        lengths = np.array([each.tokens for each in self.samples], dtype=np.int64)
        counts = {
            "images": sum(each.kept for each in self.samples),
            "documents with images": sum(each.kept > 0 for each in self.samples),
            "cut": sum(each.cut for each in laid),
            "left out as too long": self._left_out,
            "without a label": sum(not any(each.learnt) for each in laid),
        }
        padding = 1 - int(lengths.sum()) / (len(self.rows) * self.spec.seq_len)
        return Contents(lengths=lengths, padding=padding, counts=counts)

    @property
    def most_choices(self) -> int:
        """Most answers that a sample offers to choose from."""
        return max((len(each.asked.choices) for each in self.samples if each.asked is not None), default=0)

    def question(self, index: int) -> Asked | None:
        """What evaluations may ask of a row: of the first of its samples; None: nothing."""
        return self.samples[self.rows[index][0]].asked

    def stretches_of(self, row: Mapping[str, NDArray[Any]], index: int) -> list[Stretch]:
        """Where the images of a row stand, and what they are."""
        samples = [self.samples[number] for number in self.rows[index]]
        names = [str(each.images[number]) for each in samples for number in each.laid.images]
        return stretches_of(row, names if len(names) == int(row["present"].sum()) else ())

    def __getitem__(self, index: int) -> Arrays:
        """One row."""
        return self.build(self.samples[number] for number in self.rows[index])
