"""Reading the micro-batches of a step: in place, or one step ahead on a thread."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import attrs
import numpy as np

from forge_core.contract import Batch
from forge_core.data.collate import check_rows, read_rows, to_micro_batches
from forge_core.data.order import SampleOrder
from forge_core.data.sequential import ForwardReader, Lanes
from forge_core.data.source import Arrays

Window = tuple[int, int]
"""Position of a step's first sample, and its micro-batches per rank."""


@attrs.define(kw_only=True)
class RowReader:
    """Reads a rank's rows of a step, a pure function of position and count.

    Attributes:
        sources: samples by number. names: of the sources.
        order: of all samples.
        batch_size: rows of a micro-batch.
        data_rank, data_size: of this process.
        vocab_size: ids must be below; None does not look.
    """

    sources: Sequence[Any]
    names: Sequence[str]
    order: SampleOrder
    batch_size: int
    data_rank: int
    data_size: int
    vocab_size: int | None

    def samples(self, window: Window) -> tuple[Any, Any]:
        """(sources, indices), each (count * batch_size,) int64: this rank's samples in the order of rows."""
        position, count = window
        which, indices = self.order.at(position, count * self.batch_size * self.data_size)
        if self.data_size == 1:
            return which, indices
        shape = (count, self.data_size, self.batch_size)
        return tuple(
            np.ascontiguousarray(numbers.reshape(shape)[:, self.data_rank]).reshape(-1)
            for numbers in (which, indices)
        )  # type: ignore[return-value]

    def read(self, window: Window) -> Arrays:
        """The rows of all micro-batches of a step, (count * batch_size, ...) by batch key.

        Raises:
            DataError: a sample cannot be read, or a token id is beyond the vocabulary.
        """
        which, indices = self.samples(window)
        for source, name in zip(self.sources, self.names, strict=True):
            if isinstance(source, ForwardReader):
                source.deal(Lanes(*self.order.start.lanes.get(name, ())))
        arrays = read_rows(self.sources, which, indices, self.names)
        if self.vocab_size is not None and "tokens" in arrays:
            check_rows(arrays, self.vocab_size, self.names)
        return arrays


class StepReader(Protocol):
    """Hands out the micro-batches of steps, perhaps read before they are asked for."""

    def take(self, window: Window, following: Window) -> list[Batch]:
        """The micro-batches of a step. `following` is what will probably be asked for next."""
        ...

    def reset(self, order: SampleOrder) -> None:
        """Forget what was read ahead, and go on in another order."""
        ...

    def close(self) -> None:
        """Release threads and processes."""
        ...


class DirectReader:
    """Reads in the training process.

    Args:
        rows: the reader. pin: page-locked memory.
        ahead: read the following step on a thread meanwhile.
    """

    def __init__(self, rows: RowReader, *, pin: bool, ahead: bool) -> None:
        self._rows, self._pin = rows, pin
        self._thread = ThreadPoolExecutor(1, "forge-data") if ahead else None
        self._ahead: tuple[Window, Future[list[Batch]]] | None = None

    def take(self, window: Window, following: Window) -> list[Batch]:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == window:
            batches = ahead[1].result()
        else:
            if ahead is not None:
                ahead[1].exception()  # orders and streams keep state: one reader at a time
            batches = self._read(window)
        if self._thread is not None:
            self._ahead = following, self._thread.submit(self._read, following)
        return batches

    def reset(self, order: SampleOrder) -> None:
        if self._ahead is not None:
            self._ahead[1].exception()
            self._ahead = None
        self._rows.order = order

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = self._ahead = None

    def _read(self, window: Window) -> list[Batch]:
        return to_micro_batches(self._rows.read(window), self._rows.batch_size, self._pin)
