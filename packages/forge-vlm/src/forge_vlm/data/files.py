"""The files that the pictures of a source are in: whether they are there, and what tells them from others.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

LOOKED_AT = 64
"""Stretches whose content tells a data set from another."""
_SAMPLED = 1 << 12
_AT_ONCE = 1 << 12
"""Files of one thread; on a file system of a network many wait at once."""
_THREADS = 16


@attrs.define(eq=False)
class Files:
    """Files by number.

    Attributes:
        root: where their paths start. names: the paths.
        looked_at: file, offset and size of the stretches that `content` reads; size None: to its end.
    """

    root: Path
    names: Sequence[str]
    looked_at: Sequence[Sequence[int | None]]

    @cached_property
    def stats(self) -> NDArray[np.int64]:
        """(n, 2): bytes, -1 where there is no file, and time of change in nanoseconds."""
        parts = [self.names[at : at + _AT_ONCE] for at in range(0, len(self.names), _AT_ONCE)]
        if len(parts) < 2:
            return self._stats(self.names)
        with ThreadPoolExecutor(_THREADS) as pool:
            return np.concatenate(list(pool.map(self._stats, parts)))

    def _stats(self, names: Sequence[str]) -> NDArray[np.int64]:
        found = np.full((len(names), 2), -1, dtype=np.int64)
        root = f"{self.root}/"
        for number, name in enumerate(names):
            try:
                status = os.stat(name if name.startswith("/") else root + name)  # noqa: PTH116 - a million
            except (OSError, ValueError):
                continue
            if stat.S_ISREG(status.st_mode):
                found[number] = status.st_size, status.st_mtime_ns
        return found

    @property
    def missing(self) -> NDArray[np.int64]:
        """Numbers of those that are not there."""
        return np.flatnonzero(self.stats[:, 0] < 0)

    def state(self) -> str:
        """Changes whenever a file does."""
        return hashlib.blake2b(self.stats.tobytes(), digest_size=16).hexdigest()

    def content(self) -> str:
        """Changes with the sizes of files, and with what the stretches `looked_at` start and end with.

        Times of change are no part of it, so that a copy of a data set is the same data set. A file that
        cannot be read has nothing in it here; what becomes of its sample is decided when it is looked at.
        """
        digest = hashlib.blake2b(np.ascontiguousarray(self.stats[:, 0]).tobytes(), digest_size=16)
        for number, offset, size in self.looked_at:
            whole = int(self.stats[number or 0, 0])
            if whole < 0:
                continue
            start, length = offset or 0, whole if size is None else size
            with suppress(OSError), (self.root / self.names[number or 0]).open("rb") as file:
                for at in (start, start + max(0, length - _SAMPLED)):
                    file.seek(at)
                    digest.update(file.read(min(_SAMPLED, length)))
        return digest.hexdigest()
