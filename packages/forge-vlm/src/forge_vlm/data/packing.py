"""Several samples in one sequence: which ones. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import attrs
import numpy as np
from numpy.typing import NDArray

Size = tuple[int, int, int]
"""Tokens, images and patches: of a sample, or the most of a row."""


def neighbours(sizes: Iterable[Size], most: Size) -> Iterator[list[int]]:
    """Numbers of the samples of each row, in their order: as many as fit.

    Args:
        sizes: of the samples. most: of a row.
    """
    row: list[int] = []
    used = (0, 0, 0)
    for number, size in enumerate(sizes):
        together = (used[0] + size[0], used[1] + size[1], used[2] + size[2])
        if row and any(part > limit for part, limit in zip(together, most, strict=True)):
            yield row
            row, together = [], size
        row.append(number)
        used = together
    if row:
        yield row


def best_fit(sizes: Sequence[Size], most: Size) -> list[list[int]]:
    """The same; samples, longest first, each go where they leave the least room for tokens, among the rows
    that have room for their images (best-fit decreasing; Johnson 1973), rows in the order of their first
    sample.

    Takes O(log n) steps a sample for each number of images that a row may have left.
    """
    rows: list[list[int]] = []
    patches: list[int] = []  # left, by row
    rooms: list[list[tuple[int, int]]] = [
        [] for _ in range(most[1] + 1)
    ]  # by images left: (tokens left, row)
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n][0], n)):
        tokens, images, cut = sizes[number]
        fitting = []
        for left in range(images, most[1] + 1):
            for at in range(bisect_left(rooms[left], (tokens, 0)), len(rooms[left])):
                if patches[rooms[left][at][1]] >= cut:
                    fitting.append((*rooms[left][at], left))
                    break
        if fitting:
            room, row, left = min(fitting)
            del rooms[left][bisect_left(rooms[left], (room, row))]
        else:
            room, row, left = most[0], len(rows), most[1]
            rows.append([])
            patches.append(most[2])
        rows[row].append(number)
        patches[row] -= cut
        insort(rooms[left - images], (room - tokens, row))
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])


@attrs.frozen(eq=False)
class Rows(Sequence[list[int]]):
    """Numbers of the samples of each row.

    Attributes:
        order: (n,) all samples, row by row. ends: (rows,) where each ends in it; None: each sample is a row.
    """

    order: NDArray[np.int64]
    ends: NDArray[np.int64] | None

    @classmethod
    def of(cls, sizes: NDArray[Any], most: Size, how: str | None) -> Rows:
        """The rows of samples.

        Args:
            sizes: (n, 3), see `Size`. most: of a row.
            how: "neighbours", "best_fit", or None for one sample a row.
        """
        if how is None:
            return cls(np.arange(len(sizes)), None)
        each = list(map(tuple, sizes.tolist()))
        rows = best_fit(each, most) if how == "best_fit" else list(neighbours(each, most))
        order = np.fromiter((number for row in rows for number in row), np.int64, len(sizes))
        return cls(order, np.cumsum([len(row) for row in rows], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.order) if self.ends is None else len(self.ends)

    @overload
    def __getitem__(self, at: int) -> list[int]: ...

    @overload
    def __getitem__(self, at: slice) -> list[list[int]]: ...

    def __getitem__(self, at: int | slice) -> list[int] | list[list[int]]:
        if isinstance(at, slice):
            return [self[row] for row in range(len(self))[at]]
        row = range(len(self))[at]
        if self.ends is None:
            return [row]
        found: list[int] = self.order[self.ends[row - 1] if row else 0 : self.ends[row]].tolist()
        return found
