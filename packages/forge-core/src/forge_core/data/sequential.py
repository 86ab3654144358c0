"""Streams, which can only be read forwards, behind the interface of samples by number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from forge_core.data.source import Arrays, SequentialSource
from forge_core.errors import DataError


class ForwardReader:
    """Samples of a stream by number, read forwards; going back opens the stream again.

    Number g is the g-th sample that the stream gives in the run, over all ranks: each reads all of them and
    keeps those it is asked for.

    Args:
        source: the stream.
        name: in messages.
    """

    def __init__(self, source: SequentialSource, name: str) -> None:
        self._source, self._name = source, name
        self._samples: Iterator[Arrays] | None = None
        self._next = 0

    @property
    def fingerprint(self) -> str:
        return self._source.fingerprint

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Samples `indices` (R,), rising, stacked to (R, ...)."""
        samples = [self._sample(int(index)) for index in indices]
        try:
            return {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
        except (KeyError, ValueError) as error:
            raise DataError(f"source {self._name}: samples {indices.tolist()} do not fit together") from error

    def _sample(self, number: int) -> Arrays:
        if self._samples is None or number < self._next:
            self._samples, self._next = self._source.at(number), number
        try:
            for _ in range(number - self._next):
                next(self._samples)
            sample = next(self._samples)
        except StopIteration as error:
            self._samples = None
            raise DataError(f"source {self._name}: the stream ends before sample {number}") from error
        except BaseException:
            self._samples = None
            raise
        self._next = number + 1
        return sample


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
