"""Sequences of one length cut from a row of documents, and what keeps the documents apart."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from forge_core.data.source import Arrays
from forge_core.errors import DataError
from forge_core.loss.shift import IGNORE, next_token_targets


def pack_windows(windows: NDArray[Any], end: int, keep_apart: bool) -> Arrays:
    """Batch keys of windows of S + 1 tokens, each the S tokens of a sequence and the one that follows.

    A document ends with the token `end`, which belongs to it. With `keep_apart`, a document's last token has
    no target, documents are numbered from 0 in each sequence, and positions start at 0 with each document
    (also at the
    start of a sequence: what came before it cannot be seen). Without, the sequence is one text: positions run
        from 0 to S - 1, targets cross from a document to the next, and there is no `documents`.

    Args:
        windows: (R, S + 1) integers.
        end: id that ends a document.
        keep_apart: see above.

    Returns:
        tokens, targets, positions (R, S) int64; with `keep_apart` documents (R, S) int32.
    """
    tokens = windows[:, :-1].astype(np.int64)
    following = windows[:, -1]
    rows, length = tokens.shape
    offsets = np.arange(length, dtype=np.int64)
    if not keep_apart:
        return {
            "tokens": tokens,
            "targets": next_token_targets(tokens, following=following),
            "positions": np.repeat(offsets[None], rows, axis=0),
        }
    ended = tokens == end
    documents = np.zeros((rows, length + 1), dtype=np.int32)
    np.cumsum(ended, axis=1, out=documents[:, 1:])
    first = np.zeros((rows, length), dtype=np.int64)
    np.multiply(ended[:, :-1], offsets[1:], out=first[:, 1:])
    np.maximum.accumulate(first, axis=1, out=first)
    return {
        "tokens": tokens,
        "targets": next_token_targets(tokens, documents, following),
        "positions": offsets - first,
        "documents": np.ascontiguousarray(documents[:, :-1]),
    }


class PackedTokens:
    """Samples of S tokens from a flat row of tokens in which each document ends with `end`.

    Sample i starts at token i * S and sees one token more as its last target, so that each token but the very
    first is a target once. The last sample ends with the row: where the row is no multiple of S it starts
    earlier, and its tokens that were targets before are none again.

    Args:
        tokens: (n,) integers, in memory or mapped; n >= 2.
        end: id that ends a document.
        seq_len: S; a row shorter than S + 1 is an error.
        keep_apart: see `pack_windows`.
        name: in messages.

    Raises:
        DataError: fewer than S + 1 tokens.
    """

    def __init__(
        self, tokens: NDArray[Any], *, end: int, seq_len: int, keep_apart: bool = True, name: str = "text"
    ) -> None:
        if len(tokens) < seq_len + 1:
            raise DataError(
                f"{name}: {len(tokens)} tokens are too few for one sequence of {seq_len} + 1",
                "give more data or lower train.seq_len",
            )
        self.tokens = tokens
        self._end, self._length, self._keep_apart = end, seq_len, keep_apart
        self._windows = sliding_window_view(tokens, seq_len + 1)
        self._last_start = len(tokens) - seq_len - 1
        self._samples = -(-(len(tokens) - 1) // seq_len)
        self._fingerprint = ""

    def __len__(self) -> int:
        return self._samples

    @property
    def max_token(self) -> int:
        return int(self.tokens.max())

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens and of how they are cut."""
        if not self._fingerprint:
            digest = hashlib.blake2b(np.ascontiguousarray(self.tokens).data, digest_size=16)
            how = f"{self.tokens.dtype.str}/{len(self.tokens)}/{self._end}/{self._length}/{self._keep_apart}"
            digest.update(how.encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Samples `indices` (R,) as `pack_windows` gives them."""
        starts = indices * self._length
        arrays = pack_windows(
            self._windows[np.minimum(starts, self._last_start)], self._end, self._keep_apart
        )
        for row in (starts > self._last_start).nonzero()[0]:
            arrays["targets"][row, : starts[row] - self._last_start] = IGNORE
        return arrays

    def __getitem__(self, index: int) -> Arrays:
        """Sample `index`, each array (S,)."""
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        return {key: value[0] for key, value in self.batch(np.array([index], dtype=np.int64)).items()}
