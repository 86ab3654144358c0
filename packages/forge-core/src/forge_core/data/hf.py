"""The source of Hugging Face data sets: encoded once, or read as a stream."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import count, islice
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from forge_core.data.hub import load_stream, local_files
from forge_core.data.options import HfOptions
from forge_core.data.packing import RowSource, lay_out
from forge_core.data.prepare.jsonl import missing_field
from forge_core.data.prepared import job_of, prepared_text
from forge_core.data.source import Arrays, SourceSpec
from forge_core.data.tokenizer import fingerprint_of
from forge_core.errors import DataError

_SAMPLED = 1 << 16
_COMMIT = re.compile(r"[0-9a-f]{40}")


def build(spec: SourceSpec, options: HfOptions) -> RowSource | StreamedText:
    """Text of a data set.

    Raises:
        DataError: it cannot be loaded, has no such column, no text; a stream that is to be held out from or
            packed by best fit. ForgeError: the package `datasets` is not installed.
    """
    if spec.path is None:
        raise DataError("data.path: the source 'hf' needs a folder, a file or the name of a data set")
    if options.streaming:
        return StreamedText(spec, options)
    further = ("split", "format", "name", "revision")
    chosen = tuple((key, getattr(options, key)) for key in further if getattr(options, key) is not None)
    return prepared_text(spec, job_of(spec, kind="hf", field=options.field, hf=chosen))


class StreamedText:
    """A `SequentialSource` of a data set that is read in its own order; documents are laid end to end and cut
    to sequences. What an epoch leaves over is the start of the next one's first sequence.

    Attributes:
        unrepeatable: why the same position may hold other samples tomorrow, or "".
    """

    max_token = None

    def __init__(self, spec: SourceSpec, options: HfOptions) -> None:
        assert spec.path is not None
        if spec.split == "holdout":
            raise DataError(
                f"{spec.name}: nothing can be held out of a stream",
                "set data.holdout = 0, and name [[eval.sets]] to evaluate on",
            )
        if spec.packing == "best_fit":
            raise DataError(
                f"{spec.name}: best_fit needs the length of every document before the first sequence",
                'set data.packing = "concatenate", or data.hf.streaming = false',
            )
        self._spec, self._options, self._path = spec, options, spec.path
        self._keys = {key: getattr(options, key) for key in ("split", "format", "name", "revision")}
        self.unrepeatable = ""
        if not local_files(self._path) and not _COMMIT.fullmatch(options.revision or ""):
            self.unrepeatable = f"{self._path} may have changed on the hub; data.hf.revision names no commit"

    @property
    def fingerprint(self) -> str:
        """Of names, sizes and both ends of local files; of name and revision of a data set of the hub."""
        spec = self._spec
        digest = hashlib.blake2b(digest_size=16)
        how = (self._options, spec.seq_len, spec.pack, spec.seed, fingerprint_of(spec.tokenizer))
        digest.update(repr(how).encode())
        files = local_files(self._path)
        for path in files:
            size = path.stat().st_size
            digest.update(f"{path.name}/{size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(_SAMPLED))
                file.seek(max(0, size - _SAMPLED))
                digest.update(file.read(_SAMPLED))
        if not files:
            digest.update(self._path.encode())
        return digest.hexdigest()

    @cached_property
    def parts(self) -> int:
        """Files, or other shards, that can be read on their own."""
        rows = load_stream(self._path, self._keys, self._spec.cache_dir)
        return int(rows.num_shards)

    def at(self, position: int, part: int = 0, parts: int = 1) -> Iterator[Arrays]:
        """Samples from `position` on, without end; everything before is read and encoded again.

        Args:
            part, parts: of the shards of the data set, every `parts`-th share of them; by default all.
        """
        return islice(self._samples(count(), part, parts), position, None)

    def once(self) -> Iterator[Arrays]:
        """The samples of one epoch; fewer tokens than a sequence at its end are left out."""
        return self._samples([0])

    def close(self) -> None:
        """Nothing is held."""

    def _samples(self, epochs: Iterable[int], part: int = 0, parts: int = 1) -> Iterator[Arrays]:
        length = self._spec.seq_len
        tokens = np.empty(0, dtype=np.uint16)
        starts: list[int] = []
        for epoch in epochs:
            found = False
            pieces, held = [tokens], len(tokens)
            for ids in self._spec.tokenizer.encode_documents(self._texts(epoch, part, parts)):
                found = True
                if held:
                    starts.append(held)
                pieces.append(ids)
                held += len(ids)
                if held > 4 * length:
                    tokens = np.concatenate(pieces)
                    rows, starts = _cut(tokens, starts, length, self._spec.pack)
                    yield from rows
                    tokens = tokens[(held - 1) // length * length :]
                    pieces, held = [tokens], len(tokens)
            if not found:
                where = f"part {part + 1} of {parts} of {self._path}" if parts > 1 else self._path
                raise DataError(f"{self._spec.name}: there is no text in {where}")
            tokens = np.concatenate(pieces)
        if len(tokens) > length:
            yield from _cut(tokens, starts, length, self._spec.pack)[0]

    def _texts(self, epoch: int, part: int, parts: int) -> Iterator[bytes]:
        rows = load_stream(self._path, self._keys, self._spec.cache_dir)
        if parts > 1:
            rows = rows.shard(num_shards=parts, index=part)
        if self._options.shuffle_buffer:
            rows = rows.shuffle(seed=self._spec.seed, buffer_size=self._options.shuffle_buffer)
            rows.set_epoch(epoch)
        try:
            for number, row in enumerate(rows):
                text = _text(row, self._options.field, f"{self._path} document {number}")
                if text:
                    yield text
        except (OSError, ValueError) as error:
            raise DataError(f"{self._path} cannot be read: {error}") from error


def _text(row: Any, field: str, place: str) -> bytes:
    if field not in row:
        raise missing_field(place, field, list(row))
    value = row[field]
    if not isinstance(value, str | None):
        raise DataError(f"{place}: the field {field!r} is {type(value).__name__}, not text")
    return (value or "").encode("utf-8", "replace")


def _cut(
    tokens: NDArray[Any], starts: list[int], length: int, keep_apart: bool
) -> tuple[list[Arrays], list[int]]:
    """Samples of all windows of `length` + 1 tokens, each starting with the last token of the one before; and
    the starts of documents in what is left, counted from there."""
    windows = sliding_window_view(tokens, length + 1)[::length]
    places = np.array(starts, dtype=np.int64)
    rows = (places - 1) // length
    inside = rows < len(windows)
    columns = places - rows * length
    arrays = lay_out(windows, rows[inside], columns[inside], keep_apart)
    used = len(windows) * length
    samples = [{key: value[row] for key, value in arrays.items()} for row in range(len(windows))]
    return samples, [start - used for start in starts if start > used]
