"""Endless micro-batches with one global position, independent of ranks and of how a step is split."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from forge_core.contract import Batch, SampleSource
from forge_core.data.collate import check_tokens, read_rows, to_micro_batches, vocabulary_error
from forge_core.data.order import SampleOrder
from forge_core.errors import DataError

VERSION = 1


class SampleStream:
    """The `BatchStream` of samples by number.

    The position counts samples handed out over all data ranks. `take(count)` covers the next
    `count * batch_size * data_size` samples of the order; micro-batch m of data rank r holds samples
    `(m * data_size + r) * batch_size` .. `+ batch_size - 1` of them. The samples of a step, and their order,
    are therefore the same for every split with the same product. A step that reaches the end of an epoch goes
    on with the
    next: nothing is dropped, and every update has its full size.

    All data ranks call `take` with the same count. What is read ahead does not count as handed out.

    Args:
        sources: samples by number; the order says which source each sample comes from.
        order: of all samples.
        batch_size: sequences of a micro-batch of one rank.
        data_rank, data_size: of this process among those that read different samples.
        vocab_size: ids must be below; None does not look.
        global_batch: samples of an update over all ranks, checked against the size of the data; by default
            that of one micro-batch.
        pin: page-locked memory, for asynchronous copies to a device.
        prefetch: read the next step on a thread while this one runs.
        allow_changed: go on from a saved position although seed or data changed.

    Raises:
        DataError: fewer samples than `global_batch`, or a token id beyond the vocabulary.
    """

    def __init__(
        self,
        sources: Sequence[SampleSource],
        order: SampleOrder,
        *,
        batch_size: int,
        data_rank: int = 0,
        data_size: int = 1,
        vocab_size: int | None = None,
        global_batch: int | None = None,
        pin: bool = False,
        prefetch: bool = False,
        allow_changed: bool = False,
    ) -> None:
        self.sources = tuple(sources)
        self.order = order
        self._batch_size, self._data_rank, self._data_size = batch_size, data_rank, data_size
        self._pin, self._allow_changed = pin, allow_changed
        self._position = 0
        self._thread = ThreadPoolExecutor(1, "forge-data") if prefetch else None
        self._ahead: tuple[tuple[int, int], Future[list[Batch]]] | None = None
        self._check_size(global_batch or batch_size * data_size)
        self._vocab_size = unchecked_vocabulary(self.sources, vocab_size)

    @property
    def position(self) -> int:
        """Samples handed out, over all data ranks, since the run began."""
        return self._position

    def take(self, count: int) -> list[Batch]:
        """The next `count` micro-batches of this rank: `batch_size` rows each, with `sources` (B,) int64.

        Raises:
            DataError: a step of this size is larger than an epoch, or a token id is beyond the vocabulary.
        """
        window = count * self._batch_size * self._data_size
        self._check_size(window)
        wanted = (self._position, count)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == wanted:
            batches = ahead[1].result()
        else:
            if ahead is not None:
                ahead[1].exception()  # the order keeps a block in memory: one reader at a time
            batches = self._read(*wanted)
        self._position += window
        if self._thread is not None:
            after = (self._position, count)
            self._ahead = after, self._thread.submit(self._read, *after)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """The position and what it is valid for: numbers and strings only."""
        return {"version": VERSION, "position": self._position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position, on any number of ranks and with any size of micro-batch.

        Raises:
            DataError: seed, number of samples or content changed (unless `allow_changed`), or no such state.
        """
        position = state.get("position")
        if state.get("version") != VERSION or not isinstance(position, int) or position < 0:
            raise DataError(f"this is no data position of version {VERSION}: {dict(state)}")
        changed = [
            f"{name} was {state.get(name)}, is {value}"
            for name, value in self._identity().items()
            if state.get(name) != value
        ]
        if changed and not self._allow_changed:
            raise DataError(
                "the data is not what the saved position belongs to: " + "; ".join(changed),
                "restore it, or set data.allow_changed = true to go on from there in the new order",
            )
        self._position = position
        if self._ahead is not None:
            self._ahead[1].exception()
            self._ahead = None

    def close(self) -> None:
        """End the reading thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = self._ahead = None

    def _read(self, position: int, count: int) -> list[Batch]:
        """The micro-batches of a step: a pure function of position and count."""
        rows, ranks = self._batch_size, self._data_size
        which, indices = self.order.at(position, count * rows * ranks)
        if ranks > 1:
            which = np.ascontiguousarray(which.reshape(count, ranks, rows)[:, self._data_rank]).reshape(-1)
            indices = np.ascontiguousarray(indices.reshape(count, ranks, rows)[:, self._data_rank]).reshape(
                -1
            )
        arrays = read_rows(self.sources, which, indices)
        if self._vocab_size is not None and "tokens" in arrays:
            check_tokens(arrays["tokens"], self._vocab_size)
        return to_micro_batches(arrays, rows, self._pin)

    def _identity(self) -> dict[str, Any]:
        prints = [source.fingerprint for source in self.sources]
        joined = (
            prints[0] if len(prints) == 1 else hashlib.blake2b("\n".join(prints).encode()).hexdigest()[:32]
        )
        return {**self.order.describe(), "fingerprint": joined}

    def _check_size(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"a step takes at least one micro-batch, not {window} samples")
        have = self.order.epoch_size
        if have < window:
            raise too_small(have, window, self._batch_size, self._data_size)


def too_small(samples: int, window: int, batch_size: int, data_size: int) -> DataError:
    """The error for data that cannot fill one update without repeating itself."""
    of = f"{window // (batch_size * data_size)} micro-batches of {batch_size} on {data_size} data ranks"
    return DataError(
        f"the data has {samples} samples, fewer than the batch of {window} that one update takes ({of})",
        "give more data, or lower train.seq_len, train.batch_size or train.grad_accum_steps",
    )


def unchecked_vocabulary(sources: Sequence[SampleSource], vocab_size: int | None) -> int | None:
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
