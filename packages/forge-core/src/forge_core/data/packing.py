"""Sequences of one length cut from a row of documents, and what keeps the documents apart."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_core.data.row import Shard, TokenRow
from forge_core.data.source import Arrays
from forge_core.data.wording import counted
from forge_core.errors import DataError
from forge_core.loss.shift import IGNORE, next_token_targets


def pack_windows(windows: NDArray[Any], end: int, keep_apart: bool) -> Arrays:
    """Batch keys of windows of S + 1 tokens, each the S tokens of a sequence and the one that follows.

    A document ends with the token `end`, which belongs to it. With `keep_apart`, a document's last token has
    no target, documents are numbered from 0 in each sequence, and positions start at 0 with each document
    (also at the start of a sequence: what came before it cannot be seen). Without, the sequence is one text:
    positions run from 0 to S - 1, targets cross from a document to the next, and there is no `documents`.

    Args:
        windows: (R, S + 1) integers.
        end: id that ends a document.
        keep_apart: see above.

    Returns:
        tokens, targets, positions (R, S) int64; with `keep_apart` documents (R, S) int32.
    """
    rows, columns = np.nonzero(windows[:, :-1] == end) if keep_apart else _NOWHERE
    return lay_out(windows, rows, columns + 1, keep_apart)


FEW = 1000
"""From this many tokens a document on, a copy for each document is the quicker way to number them."""
_NOWHERE = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def lay_out(
    windows: NDArray[Any],
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    keep_apart: bool,
    supervised: NDArray[np.bool_] | None = None,
) -> Arrays:
    """`pack_windows` where it is known that documents start at `columns` (1 .. S) of `rows`, in order.

    `supervised` (R, S + 1) is False for tokens that must not be learnt; they are nobody's target.
    """
    tokens = windows[:, :-1].astype(np.int64)
    count, length = tokens.shape
    labels = windows
    if supervised is not None:
        labels = np.where(supervised, windows.astype(np.int64), IGNORE)
    targets = next_token_targets(labels[:, :-1], following=labels[:, -1])
    if not keep_apart:
        positions = np.repeat(np.arange(length, dtype=np.int64)[None], count, axis=0)
        return {"tokens": tokens, "targets": targets, "positions": positions}
    targets[rows, columns - 1] = IGNORE
    inside = columns < length
    positions, documents = number_documents((rows * length + columns)[inside], count, length)
    return {"tokens": tokens, "targets": targets, "positions": positions, "documents": documents}


def number_documents(
    places: NDArray[np.int64], rows: int, length: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Positions (rows, length) int64 that start at 0 with each row and each of `places`, and the number of
    the document in its row (rows, length) int32. `places` (k,) are `row * length + column` with column >= 1.
    """
    edges = np.concatenate([np.arange(rows + 1, dtype=np.int64) * length, places])
    edges.sort()
    starts = edges[:-1]
    numbers = np.arange(len(starts)) - starts.searchsorted(starts // length * length)
    counted = _counted(rows * length)
    if len(starts) * FEW < rows * length:
        positions = np.empty(rows * length, dtype=np.int64)
        documents = np.empty(rows * length, dtype=np.int32)
        for number, (start, stop) in zip(numbers.tolist(), pairwise(edges.tolist()), strict=True):
            positions[start:stop] = counted[: stop - start]
            documents[start:stop] = number
    else:
        lengths = edges[1:] - starts
        positions = np.repeat(starts, lengths)
        np.subtract(counted, positions, out=positions)
        documents = np.repeat(numbers.astype(np.int32), lengths)
    return positions.reshape(rows, length), documents.reshape(rows, length)


@lru_cache(maxsize=4)
def _counted(n: int) -> NDArray[np.int64]:
    """0 .. n - 1, read only; a run asks for the same few."""
    numbers = np.arange(n, dtype=np.int64)
    numbers.flags.writeable = False
    return numbers


class RowSource:
    """What sources that cut samples from a `TokenRow` share.

    Args:
        row: the tokens. seq_len: S. keep_apart: see `pack_windows`.
        how: the way of cutting, part of the fingerprint.
    """

    def __init__(self, row: TokenRow, seq_len: int, keep_apart: bool, how: str) -> None:
        self.row, self._length, self._keep_apart = row, seq_len, keep_apart
        self._how = f"{how}/{row.end}/{seq_len}/{keep_apart}"
        self._samples = 0

    def __len__(self) -> int:
        return self._samples

    @property
    def tokens(self) -> NDArray[Any]:
        """All tokens, (n,)."""
        return self.row.whole()

    @property
    def max_token(self) -> int:
        return self.row.max_token

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens and of how they are cut."""
        return hashlib.blake2b(f"{self.row.identity}/{self._how}".encode(), digest_size=16).hexdigest()

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Samples `indices` (R,) stacked."""
        raise NotImplementedError

    def stretches(self, index: int) -> list[tuple[int, int]]:
        """First token in the row and tokens of each stretch of it that sample `index` is made of."""
        raise NotImplementedError

    def documents_of(self, index: int) -> list[str]:
        """What the documents in sample `index` are called."""
        names = [name for start, count in self.stretches(index) for name in self.row.titled(start, count)]
        return list(dict.fromkeys(names))

    def __getitem__(self, index: int) -> Arrays:
        """Sample `index`, each array (S,)."""
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        return {key: value[0] for key, value in self.batch(np.array([index], dtype=np.int64)).items()}


class PackedTokens(RowSource):
    """Samples of S tokens from a row of documents, cut without regard to where these end.

    Sample i starts at token i * S and sees one token more as its last target, so that each token but the very
    first is a target once. The last sample ends with the row: where the row is no multiple of S it starts
    earlier, and its tokens that were targets before are none again.

    Args:
        tokens: (n,) integers, in memory or mapped, in which each document ends with `end`; or a row.
        end: id that ends a document.
        seq_len: S; a row shorter than S + 1 is an error.
        keep_apart: see `pack_windows`.
        name: in messages.

    Raises:
        DataError: fewer than S + 1 tokens.
    """

    def __init__(
        self,
        tokens: NDArray[Any] | TokenRow,
        *,
        end: int,
        seq_len: int,
        keep_apart: bool = True,
        name: str = "text",
    ) -> None:
        if len(tokens) < seq_len + 1:
            raise too_few(name, len(tokens), seq_len)
        row = tokens if isinstance(tokens, TokenRow) else TokenRow([Shard(name=name, tokens=tokens)], end=end)
        super().__init__(row, seq_len, keep_apart, "concatenate")
        self._last_start = len(row) - seq_len - 1
        self._samples = -(-(len(row) - 1) // seq_len)

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Samples `indices` (R,) as `pack_windows` gives them."""
        starts = indices * self._length
        found = self.row.windows(np.minimum(starts, self._last_start), self._length + 1)
        arrays = lay_out(found.tokens, found.rows, found.columns, self._keep_apart, found.supervised)
        for row in (starts > self._last_start).nonzero()[0]:
            arrays["targets"][row, : starts[row] - self._last_start] = IGNORE
        return arrays

    def stretches(self, index: int) -> list[tuple[int, int]]:
        return [(min(index * self._length, self._last_start), self._length)]


def too_few(name: str, tokens: int, seq_len: int) -> DataError:
    """The error for a row that does not fill one sequence."""
    verb = "is" if tokens == 1 else "are"
    return DataError(
        f"{name}: {counted(tokens, 'token')} {verb} too few for one sequence of {seq_len} + 1",
        "give more data or lower train.seq_len",
    )
