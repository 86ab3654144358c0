"""Samples to evaluate on, each once, the same set on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from forge_core.contract import Batch, EvaluationSet, SampleSource
from forge_core.data.collate import check_rows, read_rows, to_batch
from forge_core.data.draws import first_epoch
from forge_core.data.source import Arrays, DrawingSource, SequentialSource
from forge_core.data.stream import size_of, unchecked_vocabulary
from forge_core.errors import DataError
from forge_core.loss.shift import IGNORE


def evaluation_set(name: str, source: Any, **arguments: Any) -> EvaluationSet:
    """A set of samples by number, or of a stream; arguments as `HoldoutSet` takes them."""
    if size_of(source) is None:
        return StreamSet(name, source, **arguments)
    return HoldoutSet(name, source, **arguments)


class Share:
    """What every set does with its windows of `batch_size * data_size` samples: this rank's part of each.

    Args:
        name: in metrics, as `eval/<name>/loss`.
        batch_size: most rows of a batch.
        data_rank, data_size: of this process.
        limit: samples over all ranks; 0 takes all.
        vocab_size: ids must be below; None does not look.
        pin: page-locked memory.
        seed: of what a source draws that draws, see `DrawingSource`.
    """

    def __init__(
        self,
        name: str,
        *,
        batch_size: int,
        data_rank: int = 0,
        data_size: int = 1,
        limit: int = 0,
        vocab_size: int | None = None,
        pin: bool = False,
        seed: int = 0,
    ) -> None:
        self.name, self.limit = name, limit
        self.batch_size, self._data_rank, self._data_size = batch_size, data_rank, data_size
        self._vocab_size, self._pin, self._seed = vocab_size, pin, seed

    @property
    def window(self) -> int:
        """Samples of a batch over all ranks."""
        return self.batch_size * self._data_size

    def part(self, count: int) -> range:
        """Which of the `count` samples of a window are this rank's; none if too few are left."""
        share = -(-count // self._data_size)
        return range(min(self._data_rank * share, count), min((self._data_rank + 1) * share, count))

    def finish(self, arrays: Arrays, idle: bool) -> Batch:
        """A batch of rows; of an `idle` rank one that counts for nothing."""
        if self._vocab_size is not None and "tokens" in arrays:
            check_rows(arrays, self._vocab_size, (self.name,))
        if idle:
            arrays["targets"] = np.full_like(arrays["targets"], IGNORE)
        return to_batch(arrays, self._pin)


class HoldoutSet(Share):
    """An `EvaluationSet`: iterating gives this rank's share of the samples, in a fixed order, without
    repetition.

    With a limit, `limit` samples are taken at even distances over the whole set; which ones does not depend
    on the number of ranks. All ranks get the same number of batches. The last ones may be short; a rank for
    which nothing is left gets one row whose targets are all -100, so that it takes part and counts for
    nothing.
    `numbers` (B,) int64 says which sample of the source each row is.

    Args:
        source: samples by number, at least one.
        name, arguments: see `Share`.

    Raises:
        DataError: no samples, or a token id beyond the vocabulary.
    """

    def __init__(self, name: str, source: SampleSource | DrawingSource, **arguments: Any) -> None:
        super().__init__(name, **arguments)
        if not len(source):
            raise DataError(
                f"evaluation set {name}: 0 samples, batch {self.batch_size}", "give it data or leave it out"
            )
        self.source = source
        self.samples = min(self.limit or len(source), len(source))
        self._vocab_size = unchecked_vocabulary((source,), self._vocab_size)

    def __len__(self) -> int:
        """Batches of each rank."""
        return -(-self.samples // self.window)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, self.samples, self.window):
            part = self.part(min(self.window, self.samples - start))
            numbers = start + np.array(part or [0], dtype=np.int64)
            chosen = numbers * len(self.source) // self.samples
            source = first_epoch(self.source, chosen, self.name, self._seed)
            arrays = read_rows((source,), np.zeros_like(chosen), chosen, (self.name,))
            arrays["numbers"] = chosen
            yield self.finish(arrays, idle=not part)


class StreamSet(Share):
    """The `EvaluationSet` of a stream: its first samples, as far as the limit goes, each once.

    Every rank reads all of them and keeps its own; otherwise as `HoldoutSet`. `numbers` (B,) int64 counts the
    samples in the order of reading, and a rank has read those of all ranks when it gets its own.

    Raises:
        DataError: the stream is empty, or a token id is beyond the vocabulary.
    """

    def __init__(self, name: str, source: SequentialSource, **arguments: Any) -> None:
        super().__init__(name, **arguments)
        self.source = source

    def __iter__(self) -> Iterator[Batch]:
        samples = islice(self.source.once(), self.limit or None)
        read = 0
        while window := list(islice(samples, self.window)):
            part = self.part(len(window))
            arrays = _stacked(window[part.start : part.stop] or window[:1])
            arrays["numbers"] = read + np.array(part or [0], dtype=np.int64)
            read += len(window)
            yield self.finish(arrays, idle=not part)
        if not read:
            raise DataError(f"evaluation set {self.name}: the stream has 0 samples")


def _stacked(samples: Sequence[Arrays]) -> Arrays:
    arrays = {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
    return {**arrays, "sources": np.zeros(len(samples), dtype=np.int64)}
