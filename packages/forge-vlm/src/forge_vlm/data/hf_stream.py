"""Hugging Face data sets of images, read as a stream. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import count, islice
from typing import Any

import attrs
from numpy.typing import NDArray

from forge_core.data.hf import StreamedText
from forge_core.data.hub import load_stream
from forge_core.data.options import HfOptions
from forge_core.data.source import Arrays, SourceSpec
from forge_core.errors import DataError, ForgeError
from forge_vlm.data.asked import Asked
from forge_vlm.data.build import no_sample
from forge_vlm.data.columns import PICTURES_BY, Columns, Content, classes_of, folder_of, keys_of
from forge_vlm.data.options import HfImagesOptions
from forge_vlm.data.packing import Size, neighbours
from forge_vlm.data.picture import measure, read_together
from forge_vlm.data.pieces import marks_of
from forge_vlm.data.record import Found, Rejected, Writer, rejected
from forge_vlm.data.rows import RowBuilder, Sample, Stretch, stretches_of
from forge_vlm.data.source import SampleLayout, image_shape, size_of
from forge_vlm.data.telling import Census, tell_alone, tell_blind

_ASKED = 1 << 16
"""Questions of an evaluation that are kept until they are asked."""
_TELL_AT = 1000
"""Samples behind which it is told how many were cut or left out, and behind ten times as many again."""


@attrs.define
class _Before:
    """Samples that were left out since the one before, also over the end of an epoch."""

    left_out: int = 0


class StreamedImages:
    """A `SequentialSource`: the samples of a data set in its own order, each epoch from its start.

    Attributes:
        unrepeatable: why the same position may hold other samples tomorrow, or "".
        most_choices: most answers that a sample offers to choose from, of those that `once` has given.
    """

    max_token = None

    def __init__(self, spec: SourceSpec, options: HfImagesOptions) -> None:
        if options.pack and spec.packing == "best_fit":
            raise DataError(
                f"{spec.name}: best_fit needs the length of every sample before the first sequence",
                'set data.packing = "concatenate", which packs neighbours, or streaming = false',
            )
        self._spec, self._options, self.shape = spec, options, image_shape(spec)
        # what a stream of text cannot do, this one cannot either
        text = HfOptions(streaming=True, shuffle_buffer=options.shuffle_buffer, **keys_of(options))
        self._text = StreamedText(attrs.evolve(spec, packing="concatenate"), text)
        self.unrepeatable = self._text.unrepeatable
        read = partial(read_together, geometry=self.shape.geometry)
        self._told = False
        self._questions: dict[int, Asked] = {}
        self.most_choices = 0
        if options.pack:
            tell_alone(spec, self.shape)
        self.build = RowBuilder(spec, self.shape, read, options.unreadable == "mask")

    @property
    def fingerprint(self) -> str:
        """See `StreamedText.fingerprint`; also of how the samples are laid out."""
        marks = marks_of(self._spec.config)
        return f"{self._text.fingerprint}/{self._options!r}/{self.shape!r}/{marks!r}"

    @property
    def blanks(self) -> Arrays:
        """What a sample without images has of the keys for them."""
        return self.build.blanks

    @cached_property
    def parts(self) -> int:
        """Files, or other shards, that can be read on their own."""
        return self._text.parts

    def at(self, position: int, part: int = 0, parts: int = 1) -> BuiltRows:
        """Rows from `position` on, without end; the text of everything before is read and laid out again, its
        images are not decoded.

        Args:
            part, parts: of the shards of the data set, every `parts`-th share of them; by default all.
        """
        rows = BuiltRows(self.build, self._rows(count(), part, parts))
        rows.skip(position)
        return rows

    def once(self) -> Iterator[Arrays]:
        """The rows of one epoch; `question` knows of those that were read last."""
        self._questions.clear()
        self.most_choices = 0
        return BuiltRows(self.build, self._asked(self._rows([0])))

    def question(self, index: int) -> Asked | None:
        """What evaluations may ask of a row of `once`, by the order of reading: of the first of its samples;
        None: nothing."""
        return self._questions.get(index)

    def _asked(self, rows: Iterator[list[Sample]]) -> Iterator[list[Sample]]:
        for number, row in enumerate(rows):
            asked = row[0].asked
            if asked is not None:
                self._questions[number] = asked
                self.most_choices = max(self.most_choices, len(asked.choices))
                if len(self._questions) > _ASKED:
                    del self._questions[next(iter(self._questions))]
            yield row

    def stretches_of(self, row: Mapping[str, NDArray[Any]], index: int) -> list[Stretch]:
        """Where the images of a row stand."""
        return stretches_of(row)

    def close(self) -> None:
        """Nothing is held."""

    def _rows(self, epochs: Iterable[int], part: int = 0, parts: int = 1) -> Iterator[list[Sample]]:
        most = (self._spec.seq_len, self.shape.most, self.shape.patches)
        before = _Before()
        for epoch in epochs:
            empty = True
            samples = self._samples(epoch, part, parts, before)
            for row in _packed(samples, most) if self._options.pack else ([each] for each in samples):
                empty = False
                yield row
            if empty:
                raise DataError(f"{self._spec.name}: {self._spec.path} has no sample that can be used")

    def _samples(self, epoch: int, part: int, parts: int, before: _Before) -> Iterator[Sample]:
        lenient = self._options.unreadable == "mask"
        lay = SampleLayout(self._spec, self.shape, self._options.too_long, measure, lenient)
        census = Census(self._spec, self._options.too_long)
        tell_at = _TELL_AT
        for place, found in self._found(epoch, part, parts):
            try:
                sample = no_sample(found.name) if isinstance(found, Rejected) else lay(*found)
            except DataError as error:
                raise DataError(f"{self._spec.path} {place}: {error.message}", error.hint) from error
            census.add(sample)
            if census.total == tell_at and not epoch:
                census.tell()
                tell_at *= 10
            if sample.dropped:
                before.left_out += 1
                continue
            yield attrs.evolve(sample, left_out=before.left_out)
            before.left_out = 0
        if not epoch:
            census.tell()

    def _found(self, epoch: int, part: int, parts: int) -> Iterator[tuple[str, Found | Rejected]]:
        spec, options, path = self._spec, self._options, str(self._spec.path)
        rows = load_stream(path, keys_of(options), spec.cache_dir)
        features, folder, writer = rows.features, folder_of(path), Writer.of(spec, options)
        classes = classes_of(features)
        rows = rows.decode(False)
        if parts > 1:
            rows = rows.shard(num_shards=parts, index=part)
        if options.shuffle_buffer:
            rows = rows.shuffle(seed=spec.seed, buffer_size=options.shuffle_buffer)
            rows.set_epoch(epoch)
        columns = None
        for number, row in enumerate(_readable(rows, path)):
            place = f"row {number}" + (f" of part {part + 1} of {parts}" if parts > 1 else "")
            if columns is None:
                columns = Columns.of(list(row), options, path, features, row.get)
                self._tell(columns, path)
            try:
                pictures = tuple(
                    Content.of(value, folder, f"{place} {column}")
                    for column in columns.images
                    for value in _values(row[column])
                )
                yield place, writer.found(place, columns.record(row, classes), pictures)
            except DataError as error:
                found = DataError(f"{path} {place}: {error.message}", error.hint)
                found.__cause__ = error
                yield place, rejected(options, found)

    def _tell(self, columns: Columns, path: str) -> None:
        if not columns.images and not self._told:
            self._told = True
            tell_blind(self._spec.name, path, PICTURES_BY)


def _values(value: Any) -> list[Any]:
    """Images of a column; one that lacks in a list has its place, and an empty column has none."""
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def _readable(rows: Iterable[Any], path: str) -> Iterator[Any]:
    """Rows as they come.

    Raises:
        DataError: the library cannot read them.
    """
    try:
        yield from rows
    except ForgeError:
        raise
    except Exception as error:  # the library raises many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} cannot be read: {reason}") from error


class BuiltRows(Iterator[Arrays]):
    """Rows of samples, built as they are asked for.

    Args:
        build: samples of a row -> its arrays. rows: endless or not.
    """

    def __init__(self, build: RowBuilder, rows: Iterator[list[Sample]]) -> None:
        self._build, self._rows = build, rows

    def __next__(self) -> Arrays:
        return self._build(next(self._rows))

    def skip(self, count: int) -> None:
        """Leave rows out without reading their images; fewer where they end."""
        next(islice(self._rows, count, count), None)


def _packed(samples: Iterator[Sample], most: Size) -> Iterator[list[Sample]]:
    """Neighbours together, as they come."""
    held: list[Sample] = []

    def sizes() -> Iterator[Size]:
        for sample in samples:
            held.append(sample)
            yield size_of(sample)

    for row in neighbours(sizes(), most):
        yield held[: len(row)]
        del held[: len(row)]
