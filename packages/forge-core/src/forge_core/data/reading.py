"""Reading the micro-batches of a step: in place, or one step ahead on a thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_core.contract import Batch
from forge_core.data.collate import check_rows, read_rows, to_micro_batches
from forge_core.data.draws import DrawnSamples, draws, epochs_of, global_states
from forge_core.data.order import SampleOrder
from forge_core.data.sequential import ForwardReader, Lanes
from forge_core.data.source import Arrays

_log = logging.getLogger("forge.data")

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
    _drawing: list[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._drawing = [number for number, source in enumerate(self.sources) if draws(source)]

    def samples(self, window: Window) -> tuple[Any, Any]:
        """(sources, indices), each (count * batch_size,) int64: this rank's samples in the order of rows."""
        position, count = window
        which, indices = self.order.at(position, count * self.batch_size * self.data_size)
        if self.data_size == 1:
            return which, indices
        return self._own(which), self._own(indices)

    def _own(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """This rank's part of numbers of all samples of a step."""
        shape = (-1, self.data_size, self.batch_size)
        return np.ascontiguousarray(numbers.reshape(shape)[:, self.data_rank]).reshape(-1)

    def read(self, window: Window) -> Arrays:
        """The rows of all micro-batches of a step, (count * batch_size, ...) by batch key.

        Raises:
            DataError: a sample cannot be read, or a token id is beyond the vocabulary.
        """
        which, indices = self.samples(window)
        for source, name in zip(self.sources, self.names, strict=True):
            if isinstance(source, ForwardReader):
                source.deal(Lanes(*self.order.start.lanes.get(name, ())))
        sources = self._drawn(window, which) if self._drawing else self.sources
        arrays = read_rows(sources, which, indices, self.names)
        if self.vocab_size is not None and "tokens" in arrays:
            check_rows(arrays, self.vocab_size, self.names)
        return arrays

    def _drawn(self, window: Window, which: NDArray[np.int64]) -> list[Any]:
        """The sources of a step; those that draw know which epoch each of their rows, `which` (R,), is of."""
        position, count = window
        everyone = self.order.at(position, count * self.batch_size * self.data_size)[0]
        epochs = self._own(epochs_of(self.order, position, everyone, self.sources))
        found = list(self.sources)
        for number in self._drawing:
            found[number] = DrawnSamples(
                source=found[number],
                name=self.names[number],
                seed=self.order.seed,
                epochs=epochs[which == number],
            )
        return found


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
        self._read_now: Callable[[Window], list[Batch]] = self._read_first

    def take(self, window: Window, following: Window) -> list[Batch]:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == window:
            batches = ahead[1].result()
        else:
            if ahead is not None:
                ahead[1].exception()  # orders and streams keep state: one reader at a time
            batches = self._read_now(window)
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

    def _read_first(self, window: Window) -> list[Batch]:
        """Read the first step, and look whether that drew what training was to draw."""
        self._read_now = self._read
        before = global_states()
        batches = self._read(window)
        if global_states() != before:
            _log.warning(
                "reading %s drew from the global random generators: its samples will be others with another "
                "number of ranks or of data.num_workers, and after a restart; a source that draws has a "
                "method `draw` (docs/mixtures.md)",
                ", ".join(self._rows.names),
            )
        return batches

    def _read(self, window: Window) -> list[Batch]:
        return to_micro_batches(self._rows.read(window), self._rows.batch_size, self._pin)
