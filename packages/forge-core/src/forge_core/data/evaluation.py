"""Held-out samples, each once, the same set on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from forge_core.contract import Batch, SampleSource
from forge_core.data.collate import check_tokens, read_rows, to_batch
from forge_core.data.stream import unchecked_vocabulary
from forge_core.errors import DataError
from forge_core.loss.shift import IGNORE


class HoldoutSet:
    """An `EvaluationSet`: iterating gives this rank's share of the samples, in a fixed order, without
    repetition.

    With a limit, `limit` samples are taken at even distances over the whole set; which ones does not depend
    on the number of ranks. All ranks get the same number of batches. The last ones may be short; a rank for
    which nothing is left gets one row whose targets are all -100, so that it takes part and counts for
    nothing.

    Args:
        name: in metrics, as `eval/<name>/loss`.
        source: samples by number, at least one.
        batch_size: most rows of a batch.
        data_rank, data_size: of this process.
        limit: samples over all ranks; 0 takes all.
        vocab_size: ids must be below; None does not look.
        pin: page-locked memory.

    Raises:
        DataError: no samples, or a token id beyond the vocabulary.
    """

    def __init__(
        self,
        name: str,
        source: SampleSource,
        *,
        batch_size: int,
        data_rank: int = 0,
        data_size: int = 1,
        limit: int = 0,
        vocab_size: int | None = None,
        pin: bool = False,
    ) -> None:
        if not len(source):
            raise DataError(
                f"evaluation set {name}: 0 samples, batch {batch_size}", "give it data or leave it out"
            )
        self.name = name
        self.source = source
        self.samples = min(limit or len(source), len(source))
        self._batch_size, self._data_rank, self._data_size, self._pin = batch_size, data_rank, data_size, pin
        self._vocab_size = unchecked_vocabulary((source,), vocab_size)

    def __len__(self) -> int:
        """Batches of each rank."""
        return -(-self.samples // (self._batch_size * self._data_size))

    def __iter__(self) -> Iterator[Batch]:
        window = self._batch_size * self._data_size
        for start in range(0, self.samples, window):
            yield self._read(start, min(window, self.samples - start))

    def _read(self, start: int, count: int) -> Batch:
        """This rank's part of samples start .. start + count - 1."""
        share = -(-count // self._data_size)
        mine = np.arange(self._data_rank * share, min((self._data_rank + 1) * share, count), dtype=np.int64)
        idle = not mine.size
        chosen = (start + (np.zeros(1, dtype=np.int64) if idle else mine)) * len(self.source) // self.samples
        arrays = read_rows((self.source,), np.zeros(len(chosen), dtype=np.int64), chosen)
        if self._vocab_size is not None and "tokens" in arrays:
            check_tokens(arrays["tokens"], self._vocab_size)
        if idle:
            arrays["targets"] = np.full_like(arrays["targets"], IGNORE)
        return to_batch(arrays, self._pin)
