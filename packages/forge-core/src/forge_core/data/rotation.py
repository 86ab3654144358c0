"""Which source each draw of a mixture comes from, and how often each came before: both in closed form.

Draw k sits at the point (a k + c) mod M of a circle of M points, where a / M is the golden ratio's fraction;
each source owns an arc as long as its share. The points of a golden rotation are spread as evenly as can be
(Weyl 1916; Niederreiter 1992, section 3.1), so that any stretch of n draws holds each source's share of n up
to a few, and so does every k-th of them. How many of the first n points fall on an arc is a sum of floors,
which a Euclidean recursion computes in O(log n) (Graham, Knuth, Patashnik, "Concrete Mathematics", 3.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

CIRCLE = 1 << 32
"""M, the points of the circle: shares are kept to this precision."""
STEP = 0x9E3779B9
"""a: odd, so that M draws visit each point once; a / M is the fraction of the golden ratio to 32 bits."""


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Sum of floor((a i + b) / m) for i = 0 .. n - 1, of non-negative integers, m > 0."""
    total = 0
    while True:
        total += (a // m) * (n * (n - 1) // 2) + (b // m) * n
        a, b = a % m, b % m
        top = a * n + b
        if top < m:
            return total
        n, b = divmod(top, m)
        m, a = a, m


def arcs(shares: Sequence[float]) -> tuple[int, ...]:
    """Lengths of arcs that add up to `CIRCLE`, by share; a share above 0 has at least one point.

    Args:
        shares: not negative, at least one above 0; they need not add up to 1.
    """
    total = sum(shares)
    lengths = [max(1, round(share / total * CIRCLE)) if share > 0 else 0 for share in shares]
    lengths[lengths.index(max(lengths))] += CIRCLE - sum(lengths)
    return tuple(lengths)


class Rotation:
    """A mixture under fixed shares.

    Args:
        lengths: of the sources' arcs, see `arcs`.
        start: c, where draw 0 sits; a number below `CIRCLE`.
    """

    def __init__(self, lengths: Sequence[int], start: int) -> None:
        self.lengths = tuple(lengths)
        self.start = start
        self._ends = tuple(accumulate(self.lengths))
        self._bounds = np.array(self._ends[:-1], dtype=np.uint64)

    def sources(self, first: int, count: int) -> NDArray[np.int64]:
        """Sources of draws `first` .. `first + count - 1`, (count,) int64."""
        draws = np.arange(count, dtype=np.uint64)
        draws *= np.uint64(STEP)
        draws += np.uint64((STEP * first + self.start) % CIRCLE)
        draws &= np.uint64(CIRCLE - 1)
        return np.searchsorted(self._bounds, draws, side="right").astype(np.int64, copy=False)

    def drawn(self, draws: int) -> tuple[int, ...]:
        """How many of the first `draws` draws each source has."""
        below = [0, *(self._below(draws, end) for end in self._ends)]
        return tuple(b - a for a, b in pairwise(below))

    def _below(self, draws: int, end: int) -> int:
        """How many of the first `draws` points lie before `end`."""
        if end in (0, CIRCLE):
            return draws if end else 0
        passed = floor_sum(draws, CIRCLE, STEP, self.start)
        return draws + passed - floor_sum(draws, CIRCLE, STEP, self.start + CIRCLE - end)
