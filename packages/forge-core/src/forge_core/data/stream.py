"""Endless micro-batches with one global position, independent of ranks and of how a step is split."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from forge_core.contract import Batch, SampleSource
from forge_core.data.collate import vocabulary_error
from forge_core.data.order import SampleOrder
from forge_core.data.position import Identity, load_position, save_position
from forge_core.data.reading import DirectReader, RowReader, StepReader
from forge_core.data.sequential import ForwardReader, choose_lanes, refuse_resume
from forge_core.data.source import DrawingSource, SequentialSource
from forge_core.data.wording import counted
from forge_core.errors import DataError

_log = logging.getLogger("forge.data")


class SampleStream:
    """The `BatchStream` of one or several sources.

    The position counts samples handed out over all data ranks. `take(count)` covers the next
    `count * batch_size * data_size` samples of the order; micro-batch m of data rank r holds samples
    `(m * data_size + r) * batch_size` .. `+ batch_size - 1` of them. The samples of a step, and their order,
    are therefore the same for every split with the same product. A step that reaches the end of an epoch goes
    on with the next: nothing is dropped, and every update has its full size.

    All data ranks call `take` with the same count. What is read ahead does not count as handed out.

    Args:
        sources: samples by number, or streams; the order says which source each sample comes from.
        order: of all samples, with the names of the sources.
        batch_size: sequences of a micro-batch of one rank.
        data_rank, data_size: of this process among those that read different samples.
        vocab_size: ids must be below; None does not look.
        global_batch: samples of an update over all ranks, checked against the size of the data and against a
            saved position; None where updates differ in size.
        pin: page-locked memory, for asynchronous copies to a device.
        prefetch: read the next step on a thread while this one runs.
        workers: processes that read; 0 reads in this one. With streams at most one is used, as each would
            read the whole stream.
        steps_ahead: steps that each worker reads ahead.
        allow_changed: go on from a saved position although seed, data or global batch changed.

    Raises:
        DataError: fewer samples than an update takes, or a token id beyond the vocabulary.
    """

    def __init__(
        self,
        sources: Sequence[SampleSource | DrawingSource | SequentialSource],
        order: SampleOrder,
        *,
        batch_size: int,
        data_rank: int = 0,
        data_size: int = 1,
        vocab_size: int | None = None,
        global_batch: int | None = None,
        pin: bool = False,
        prefetch: bool = False,
        workers: int = 0,
        steps_ahead: int = 2,
        allow_changed: bool = False,
    ) -> None:
        self.sources = tuple(sources)
        self.order = order = dealt(sources, order, global_batch or 0)
        self._global_batch = global_batch or 0
        self._window = batch_size * data_size
        self._batch_size, self._allow_changed = batch_size, allow_changed
        self._position = 0
        self._check_size(global_batch or self._window)
        self.rows = RowReader(
            sources=[opened(source, name) for source, name in zip(sources, order.names, strict=True)],
            names=order.names,
            order=order,
            batch_size=batch_size,
            data_rank=data_rank,
            data_size=data_size,
            vocab_size=unchecked_vocabulary(sources, vocab_size),
        )
        self._reader = step_reader(self.rows, pin, prefetch, workers, steps_ahead)

    @property
    def position(self) -> int:
        """Samples handed out, over all data ranks, since the run began."""
        return self._position

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources; `sources` of a batch are places in it."""
        return self.order.names

    def take(self, count: int) -> list[Batch]:
        """The next `count` micro-batches of this rank: `batch_size` rows each, with `sources` (B,) int64.

        Raises:
            DataError: a step of this size is larger than an epoch, the data ends, a sample cannot be read, or
                a token id is beyond the vocabulary.
        """
        window = count * self._window
        self._check_size(window)
        position = self._position
        batches = self._reader.take((position, count), (position + window, count))
        self._position += window
        return batches

    def skip(self, count: int) -> None:
        """Move on as `take` does, and read nothing.

        Raises:
            DataError: a step of this size is larger than an epoch.
        """
        self._check_size(count * self._window)
        self._position += count * self._window

    def state_dict(self) -> dict[str, Any]:
        """The position and what it is valid for, the same on all ranks: numbers, strings and mappings."""
        return save_position(self._position, self.order, self._identity())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position, on any number of ranks and with any size of micro-batch.

        Changed weights, phases or sets of sources are taken over: every source goes on where it stopped.

        Raises:
            DataError: seed, global batch, or size or content of a source changed (unless `allow_changed`); a
                stream cannot go on; or no such state.
        """
        position, order = load_position(
            state, self.order, self._identity(), allow_changed=self._allow_changed
        )
        for source, name in zip(self.sources, order.names, strict=True):
            if order.drawn(position)[name]:
                refuse_resume(source, name)
        self._position, self.order = position, order
        self._reader.reset(order)

    def close(self) -> None:
        """End reading threads and processes."""
        self._reader.close()

    def _identity(self) -> Identity:
        sources = {
            name: {"samples": size_of(source), "fingerprint": source.fingerprint}
            for name, source in zip(self.order.names, self.sources, strict=True)
        }
        return Identity(seed=self.order.seed, global_batch=self._global_batch, sources=sources)

    def _check_size(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"a step takes at least one micro-batch, not {window} samples")
        have, end = self.order.epoch_size, self.order.end
        if have is not None and have < window:
            raise too_small(have, window, self._batch_size, self._window // self._batch_size)
        if end is not None and end < window:
            raise too_small(end, window, self._batch_size, self._window // self._batch_size)


def opened(source: Any, name: str) -> Any:
    """A source as it is read: a stream behind a reader that only goes forwards."""
    return source if hasattr(source, "__len__") else ForwardReader(source, name)


def dealt(sources: Sequence[Any], order: SampleOrder, global_batch: int) -> SampleOrder:
    """The order of a run that reads nothing but one stream, with its samples dealt to the stream's parts.

    In a mixture the ranks' samples of a stream do not stay in the same parts, and it is read as one.
    """
    if len(sources) != 1 or size_of(sources[0]) is not None:
        return order
    lanes = choose_lanes(sources[0], global_batch)
    if lanes.count == 1:
        return order
    return order.rebased(attrs.evolve(order.start, lanes={order.names[0]: (lanes.window, lanes.count)}))


def size_of(source: Any) -> int | None:
    """Samples of an epoch, None for a stream."""
    return len(source) if hasattr(source, "__len__") else None


def step_reader(rows: RowReader, pin: bool, prefetch: bool, workers: int, steps_ahead: int) -> StepReader:
    """How steps are read: by workers, on a thread, or in place."""
    if not workers:
        return DirectReader(rows, pin=pin, ahead=prefetch)
    from forge_core.data.workers import WorkerReader

    if workers > 1 and any(isinstance(source, ForwardReader) for source in rows.sources):
        _log.warning("a stream is read by one worker, not by %d: each would read all of it", workers)
        workers = 1
    return WorkerReader(rows, workers=workers, ahead=steps_ahead, pin=pin)


def too_small(samples: int, window: int, batch_size: int, data_size: int) -> DataError:
    """The error for data that cannot fill one update without repeating itself."""
    micro_batches = counted(window // (batch_size * data_size), "micro-batch", "micro-batches")
    of = f"{micro_batches} of {batch_size} on {counted(data_size, 'data rank')}"
    return DataError(
        f"the data has {counted(samples, 'sample')}, fewer than the batch of {window} that one update takes "
        f"({of})",
        "give more data, or lower train.seq_len, train.batch_size or train.grad_accum_steps",
    )


def unchecked_vocabulary(sources: Sequence[Any], vocab_size: int | None) -> int | None:
    """Check sources that know their largest token id; the size that batches are still to be checked against.

    Raises:
        DataError: naming the token id and the size.
    """
    if vocab_size is None:
        return None
    known = [getattr(source, "max_token", None) for source in sources]
    for largest in known:
        if largest is not None and largest >= vocab_size:
            raise vocabulary_error(int(largest), vocab_size)
    return vocab_size if any(largest is None for largest in known) else None
