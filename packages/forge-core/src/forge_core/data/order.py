"""Which sample comes when: a pure function of the global position."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forge_core.data.permute import permutation_key, permute

BLOCK = 4096
"""Indices computed at a time; small steps would otherwise pay numpy's call overhead on every step."""


class SampleOrder(Protocol):
    """The order of all samples of a run, whatever the number of ranks or the size of a micro-batch.

    It depends on the position alone, so that any part of it can be computed again, by any process.
    """

    def at(self, position: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Samples `position` .. `position + count - 1` of the run.

        Returns:
            sources (count,) int64, number of the source of each; indices (count,) int64, index inside its
            source.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """What the order depends on; a saved position is valid only under the same."""
        ...

    @property
    def epoch_size(self) -> int:
        """Samples after which one may come again."""
        ...


class ShuffledOrder:
    """All samples of one source, epoch after epoch, each epoch in an order of its own.

    Sample g of the run is number g mod n of epoch g // n: the end of an epoch is the start of the next,
    nothing is dropped and nothing repeats inside an epoch. Memory does not grow with n.

    Args:
        samples: n, at least 1.
        seed: any non-negative integer.
        name: keeps the orders of several sources under one seed apart.
        source: number of the source.
    """

    def __init__(self, samples: int, seed: int, name: str = "", source: int = 0) -> None:
        if samples < 1:
            raise ValueError(f"an order needs at least one sample, not {samples}")
        self._samples, self._seed, self._name, self._source = samples, seed, name, source
        self._number: tuple[int, int] | None = None
        self._block: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    @property
    def epoch_size(self) -> int:
        return self._samples

    def describe(self) -> dict[str, Any]:
        return {"seed": self._seed, "samples": self._samples}

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
            self._block = permute(wanted, self._samples, permutation_key(self._seed, epoch, self._name))
            self._number = (epoch, block)
        return self._block
