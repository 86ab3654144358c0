"""Samples of text and images as rows of the core's pipeline. Imports no torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_core.data.inspection import Contents
from forge_core.data.source import Arrays, SourceSpec
from forge_core.data.wording import counted
from forge_core.errors import DataError
from forge_vlm.data.asked import Asked
from forge_vlm.data.layout import Laid, Part, compacted, lay_out, parts_in
from forge_vlm.data.packing import Size
from forge_vlm.data.patches import grids_of
from forge_vlm.data.pieces import Cutting
from forge_vlm.data.pixels import Shown
from forge_vlm.data.plans import planned
from forge_vlm.data.rows import Row as Row
from forge_vlm.data.rows import RowBuilder, Sample, Stretch, Where, stretches_of
from forge_vlm.data.stored import CUT, SILENT, Samples
from forge_vlm.data.telling import tell_alone
from forge_vlm.geometry import ImageShape, shape_of

_KEPT = 1 << 20
"""Tokens whose layout is kept."""


def image_shape(spec: SourceSpec) -> ImageShape:
    """How images enter the sequences of the run that the source is built for.

    Raises:
        DataError: the run has no `[vlm]`.
    """
    if spec.config is None or "vlm" not in spec.config:
        raise DataError(f"{spec.name}: images need a model that sees", "add the table [vlm]")
    return shape_of(spec.config)


class SampleLayout:
    """Lays samples out one by one.

    Args:
        spec: of the source. shape: of images.
        too_long: what becomes of a sample longer than a sequence, see `SampleOptions`.
        measure: height and width in pixels of what a sample has of an image, where encoders see images in
            sizes of their own; None: that of a file.
        lenient: one that the encoder does not take is found out when it is read.
    """

    def __init__(
        self,
        spec: SourceSpec,
        shape: ImageShape,
        too_long: str = "cut",
        measure: Callable[[Any], tuple[int, int]] | None = None,
        lenient: bool = False,
    ) -> None:
        self.lenient = lenient
        self.spec, self.shape, self.too_long, self.measure = spec, shape, too_long, measure
        self.cutting = Cutting.of(spec.config, spec.tokenizer, shape)
        self._laid: dict[tuple[bytes, tuple[int, ...]], Laid] = {}
        self._kept = 0

    def __call__(
        self, name: str, parts: Sequence[Part], images: tuple[Any, ...], asked: Asked | None = None
    ) -> Sample:
        """One sample, which may say that it is left out.

        Raises:
            DataError: it has more images than a sequence can hold, or is too long where that is an error.
        """
        spec, shape = self.spec, self.shape
        if self.cutting is not None:
            parts, images = self.cutting.sample(parts, images, self.measure)
        if len(images) > shape.most:
            what = "images" if self.cutting is None else "images and pieces"
            found = counted(len(images), "image", what)
            message = f"{name} has {found}, more than vlm.max_images = {shape.most}"
            raise DataError(message, "set it higher")
        grids = grids_of(name, images, shape, self.measure, self.lenient)
        places = tuple(shape.places_of(grid) for grid in grids)
        tokens, kept, silent, cut = self._measured(parts, places)
        if cut and self.too_long == "error":
            raise DataError(f"{name} does not fit train.seq_len = {spec.seq_len}")
        return Sample(
            name=name,
            parts=compacted(parts),
            places=places,
            lay=self.lay,
            tokens=tokens,
            kept=len(kept),
            # a marker may lie behind the vocabulary: nothing predicts it
            largest=max((max(part.ids) for part in parts if part.ids), default=0),
            images=tuple(images),
            patches=sum(math.prod(grids[number]) for number in kept),
            asked=asked,
            cut=cut,
            silent=silent,
            dropped=cut and self.too_long == "drop",
        )

    def _measured(
        self, parts: Sequence[Part], places: tuple[int, ...]
    ) -> tuple[int, Sequence[int], bool, bool]:
        """Tokens that are left of a sample, images that are, whether it has no label, whether it is cut."""
        mark = 0 if self.shape.marker is None else 1
        images = [part.image for part in parts if part.image is not None]
        total = sum(len(part.ids) for part in parts) + sum(places[number] + mark for number in images)
        if total <= self.spec.seq_len:  # nothing has to be laid out to know it
            return total, images, not any(part.learnt and part.ids for part in parts), False
        laid = self._lay_out(parts, places)
        return len(laid.tokens), laid.images, not laid.learnt.any(), True

    def lay(self, content: bytes, places: tuple[int, ...]) -> Laid:
        """`lay_out` of compacted parts; small data sets are laid out once."""
        found = self._laid.get((content, places))
        if found is None:
            found = self._lay_out(parts_in(content), places)
            self._kept += len(found.tokens)
            if self._kept > _KEPT:
                self._laid, self._kept = {}, len(found.tokens)
            self._laid[content, places] = found
        return found

    def _lay_out(self, parts: Sequence[Part], places: tuple[int, ...]) -> Laid:
        spec = self.spec
        return lay_out(
            parts,
            places=places,
            limit=spec.seq_len,
            eos_id=spec.tokenizer.eos_id,
            marker=self.shape.marker,
        )


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
        where: see `RowBuilder`.
        pack: several samples a row. mask_unreadable: an image that cannot be read is left out, with all
            labels of its sample, and counted.
    """

    def __init__(
        self,
        spec: SourceSpec,
        shape: ImageShape,
        samples: Samples,
        read: Callable[[Sequence[Any]], Sequence[Shown]],
        *,
        about: str = "",
        pack: bool = False,
        mask_unreadable: bool = False,
        where: Where | None = None,
    ) -> None:
        self.spec, self.shape, self.samples = spec, shape, samples
        self.build = RowBuilder(spec, shape, read, mask_unreadable, where)
        sizes = samples.column("sizes")
        most = (spec.seq_len, shape.most, shape.patches)
        self._packing = packing_of(spec, pack)
        if pack and np.count_nonzero(sizes[:, 1]) > 1:
            tell_alone(spec, shape)
        self.rows = planned(spec, sizes, most, self._packing)
        self.max_token = int(samples.column("largest").max(initial=0))
        self.most_choices = int(samples.column("choices").max(initial=0))
        self.tokens_per_sample = int(sizes[:, 0].sum(dtype=np.int64)) / max(len(self.rows), 1)
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
        digest.update(self.samples.columns.digest.encode())
        digest.update(self.samples.numbers.tobytes())
        return digest.hexdigest()

    @property
    def blanks(self) -> Arrays:
        """What a sample without images has of the keys for them."""
        return self.build.blanks

    def documents_of(self, index: int) -> list[str]:
        """Names of the samples of a row."""
        return [self.samples[number].name for number in self.rows[index]]

    def contents(self) -> Contents:
        """What `forge data inspect` shows."""
        samples = self.samples
        lengths, kept, _ = samples.column("sizes").astype(np.int64).T
        counts = {
            "images": int(kept.sum()),
            "documents with images": int(np.count_nonzero(kept)),
            "cut": samples.count(CUT),
            **samples.why_left_out(),
            "without a label": samples.count(SILENT),
        }
        padding = 1 - int(lengths.sum()) / (len(self.rows) * self.spec.seq_len)
        return Contents(lengths=lengths, padding=padding, counts=counts)

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
