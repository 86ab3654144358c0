"""Which sample comes when: a pure function of the global position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_core.data.permute import permutation_key, permute
from forge_core.data.wording import counted
from forge_core.errors import DataError

BLOCK = 4096
"""Indices computed at a time; small steps would otherwise pay numpy's call overhead on every step."""


@attrs.frozen(kw_only=True)
class Start:
    """Where a run goes on in an order.

    Attributes:
        position: samples handed out before.
        update: updates done before.
        drawn: samples that each source has given before, by name; sources that are not there gave none.
        lanes: window and count of the `Lanes` of a stream, by name.
    """

    position: int = 0
    update: int = 0
    drawn: Mapping[str, int] = attrs.field(factory=dict)
    lanes: Mapping[str, Sequence[int]] = attrs.field(factory=dict)


class SampleOrder(Protocol):
    """The order of all samples of a run, whatever the number of ranks or the size of a micro-batch.

    It depends on the position alone, so that any part of it can be computed again, by any process.
    """

    seed: int
    start: Start

    def at(self, position: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Samples `position` .. `position + count - 1` of the run.

        Returns:
            sources (count,) int64, number of the source of each; indices (count,) int64, index inside its
            source.

        Raises:
            DataError: the data ends before that.
        """
        ...

    def drawn(self, position: int) -> dict[str, int]:
        """Samples that each source has given before `position`, by name."""
        ...

    def rebased(self, start: Start) -> SampleOrder:
        """The order of a run that goes on at `start`."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources."""
        ...

    @property
    def end(self) -> int | None:
        """Position at which the data is used up; None if it starts over for ever."""
        ...

    @property
    def epoch_size(self) -> int | None:
        """Samples after which one may come again; None if nobody knows."""
        ...


def ended(position: int, count: int, end: int) -> DataError:
    """The error for samples behind the end."""
    return DataError(
        f"the data ends after {counted(end, 'sample')}, "
        f"and samples {position} to {position + count - 1} are asked for",
        "allow more epochs in [[data.mix]], or train for fewer updates",
    )


class ShuffledOrder:
    """All samples of one source, epoch after epoch, each epoch in an order of its own.

    Sample g of the run is number g mod n of epoch g // n: the end of an epoch is the start of the next,
    nothing is dropped and nothing repeats inside an epoch. Memory does not grow with n.

    Args:
        samples: n, at least 1.
        seed: any non-negative integer.
        name: keeps the orders of several sources under one seed apart.
        source: number of the source.
        label: its name in a saved position.
        start: only its position is used.
    """

    end = None

    def __init__(
        self,
        samples: int,
        seed: int,
        name: str = "",
        source: int = 0,
        *,
        label: str = "data",
        start: Start | None = None,
    ) -> None:
        if samples < 1:
            raise ValueError(f"an order needs at least one sample, not {samples}")
        self._samples, self.seed, self._name, self._source = samples, seed, name, source
        self.names = (label,)
        self.start = start or Start()
        self._number: tuple[int, int] | None = None
        self._block: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    @property
    def epoch_size(self) -> int:
        return self._samples

    def drawn(self, position: int) -> dict[str, int]:
        return {self.names[0]: position}

    def rebased(self, start: Start) -> ShuffledOrder:
        return ShuffledOrder(
            self._samples, self.seed, self._name, self._source, label=self.names[0], start=start
        )

    def at(self, position: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `SampleOrder.at`; O(count) time and memory at any position."""
        indices = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            epoch, offset = divmod(position + done, self._samples)
            block, inside = divmod(offset, BLOCK)
            run = self._read(epoch, block)[inside : inside + count - done]
            indices[done : done + len(run)] = run
            done += len(run)
        return np.full(count, self._source, dtype=np.int64), indices

    def _read(self, epoch: int, block: int) -> NDArray[np.int64]:
        if self._number != (epoch, block):
            first = block * BLOCK
            wanted = np.arange(first, min(first + BLOCK, self._samples))
            self._block = permute(wanted, self._samples, permutation_key(self.seed, epoch, self._name))
            self._number = (epoch, block)
        return self._block


class StreamOrder:
    """The samples of a stream, in its own order: number g of the run is the g-th that it gives.

    Args:
        source: number of the source.
        label: its name in a saved position.
        seed: of the stream's own order, to be noticed when it changes.
        start: only its position is used.
    """

    end = None
    epoch_size = None

    def __init__(
        self, source: int = 0, *, label: str = "data", seed: int = 0, start: Start | None = None
    ) -> None:
        self._source, self.seed = source, seed
        self.names = (label,)
        self.start = start or Start()

    def drawn(self, position: int) -> dict[str, int]:
        return {self.names[0]: position}

    def rebased(self, start: Start) -> StreamOrder:
        return StreamOrder(self._source, label=self.names[0], seed=self.seed, start=start)

    def at(self, position: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `SampleOrder.at`."""
        return (
            np.full(count, self._source, dtype=np.int64),
            np.arange(position, position + count, dtype=np.int64),
        )
