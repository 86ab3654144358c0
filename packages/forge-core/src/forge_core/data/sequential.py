"""Streams, which can only be read forwards, behind the interface of samples by number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_core.data.source import Arrays
from forge_core.errors import DataError

MOST_LANES = 256
"""Parts that are read side by side; each keeps a file, or a connection, and a shuffle buffer."""


@attrs.frozen
class Lanes:
    """How the samples of a run are dealt to the parts of a stream.

    Each window of samples is cut into `count` blocks, and block l holds the next samples of part l. A rank
    whose samples lie in some of the blocks reads only their parts. The dealing is kept with the position, so
    that it does not depend on the ranks.

    Attributes:
        window: samples of an update when the run began. count: parts; divides `window`.
    """

    window: int = 1
    count: int = 1

    def place(self, number: int) -> tuple[int, int]:
        """(lane, number in the lane) of a sample of the run."""
        block = self.window // self.count
        window, inside = divmod(number, self.window)
        lane, rest = divmod(inside, block)
        return lane, window * block + rest


def choose_lanes(source: Any, global_batch: int) -> Lanes:
    """As many lanes as the stream has parts and an update can be cut into evenly."""
    most = min(int(getattr(source, "parts", 1)), MOST_LANES, global_batch)
    count = next((n for n in range(most, 1, -1) if global_batch % n == 0), 1)
    return Lanes(global_batch, count) if count > 1 else Lanes()


class ForwardReader:
    """Samples of a stream by number, read forwards; going back opens the stream again.

    Number g is the g-th sample that the stream gives in the run, over all ranks. A rank reads the parts that
    its samples are in, and keeps those it is asked for.

    Args:
        source: a `SequentialSource`.
        name: in messages.
    """

    def __init__(self, source: Any, name: str) -> None:
        self._source, self._name = source, name
        self.lanes = Lanes()
        self._open: dict[int, tuple[Iterator[Arrays], int]] = {}

    @property
    def fingerprint(self) -> str:
        found: str = self._source.fingerprint
        return found

    @property
    def blanks(self) -> Arrays:
        """See `BatchedSource.blanks`."""
        found: Arrays = getattr(self._source, "blanks", {})
        return found

    def deal(self, lanes: Lanes) -> None:
        """Read in these lanes from now on."""
        if lanes != self.lanes:
            self.lanes = lanes
            self._open.clear()

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Samples `indices` (R,), rising, stacked to (R, ...)."""
        samples = [self._sample(int(index)) for index in indices]
        try:
            return {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
        except (KeyError, ValueError) as error:
            raise DataError(f"source {self._name}: samples {indices.tolist()} do not fit together") from error

    def _sample(self, number: int) -> Arrays:
        lane, wanted = self.lanes.place(number)
        samples, following = self._open.pop(lane, (None, 0))
        if samples is None or wanted < following:
            samples, following = self._at(wanted, lane), wanted
        try:
            self._skip(samples, wanted - following)
            sample = next(samples)
        except StopIteration as error:
            raise DataError(f"source {self._name}: the stream ends before sample {number}") from error
        self._open[lane] = samples, wanted + 1
        return sample

    @staticmethod
    def _skip(samples: Any, count: int) -> None:
        """Leave samples out; an iterator that has `skip(count)` need not make them."""
        skip = getattr(samples, "skip", None)
        if skip is not None:
            skip(count)
            return
        for _ in range(count):
            next(samples)

    def _at(self, position: int, lane: int) -> Iterator[Arrays]:
        if self.lanes.count == 1:
            found: Iterator[Arrays] = self._source.at(position)
        else:
            found = self._source.at(position, lane, self.lanes.count)
        return found


def refuse_resume(source: object, name: str) -> None:
    """Refuse to go on in a stream that says it cannot be read from the same place again.

    Such a stream has a text `unrepeatable` with the reason; it would repeat or lose samples in silence.
    """
    reason = getattr(source, "unrepeatable", "")
    if reason:
        raise DataError(
            f"source {name} cannot go on where the saved run stopped: {reason}",
            "start a new run, or prepare the data with `forge data prepare`",
        )
