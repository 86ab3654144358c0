"""One long row of tokens, laid out over parts of shards, with its documents."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 22
"""Tokens looked at together when a row is scanned."""


@attrs.frozen(kw_only=True, eq=False)
class Shard:
    """Tokens of one file, in memory or mapped.

    Attributes:
        name: in messages.
        tokens: (n,) unsigned or signed integers.
        documents: (d + 1,) int64, where each document starts, and n at the end; None where only the id that
            ends a document tells.
        supervised: (n,) bool or uint8, 0 for tokens that must not be learnt; None for all of them.
        titles: names of the d documents, where they have any.
    """

    name: str
    tokens: NDArray[Any]
    documents: NDArray[np.int64] | None = None
    supervised: NDArray[Any] | None = None
    titles: Sequence[str] | None = None

    def titled(self, start: int, count: int) -> list[str]:
        """What the documents in `count` tokens from `start` on are called."""
        if self.documents is None:
            return [f"{self.name} tokens {start}..{start + count - 1}"]
        first, last = (self.documents.searchsorted([start, start + count - 1], "right") - 1).tolist()
        if self.titles is not None:
            return list(self.titles[first : last + 1])
        return [f"{self.name} document {number}" for number in range(first, last + 1)]


@attrs.frozen
class Segment:
    """Tokens `start` .. `stop - 1` of shard number `shard`. Its ends are ends of documents."""

    shard: int
    start: int
    stop: int


@attrs.frozen(eq=False)
class Windows:
    """R stretches of a row.

    Attributes:
        tokens: (R, length) in the type of the shards.
        supervised: (R, length) bool, or None for all.
        rows, columns: (k,) int64 each, in order: a document starts at column `columns[i] >= 1` of row
            `rows[i]`.
    """

    tokens: NDArray[Any]
    supervised: NDArray[np.bool_] | None
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]


Span = tuple[int, int, int, int, int]
"""Row, shard, first token in the shard, tokens, column."""


class TokenRow:
    """Segments of shards, one behind the other.

    Args:
        shards: all of one type of tokens; all or none with `supervised`.
        segments: none of them empty; by default each shard as a whole.
        end: id that ends a document, where a shard has no `documents`.
        identity: changes when the content does; by default a hash of all tokens.
        max_token: the largest id, where it is known.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        segments: Sequence[Segment] | None = None,
        *,
        end: int,
        identity: str = "",
        max_token: int | None = None,
    ) -> None:
        self.shards, self.end = tuple(shards), end
        whole = [Segment(i, 0, len(shard.tokens)) for i, shard in enumerate(self.shards)]
        self.segments = tuple(whole if segments is None else segments)
        self._edges = np.cumsum([0, *(s.stop - s.start for s in self.segments)])
        self._first = self._edges.tolist()
        self._identity, self._max_token = identity, max_token
        self._indexed = all(shard.documents is not None for shard in self.shards)

    def __len__(self) -> int:
        return int(self._first[-1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens."""
        return self.shards[0].tokens.dtype

    @property
    def identity(self) -> str:
        """Changes when tokens, documents or what is supervised change."""
        if not self._identity:
            digest = hashlib.blake2b(f"{self.dtype.str}/{len(self)}".encode(), digest_size=16)
            for shard, segment in self._parts():
                digest.update(np.ascontiguousarray(shard.tokens[segment.start : segment.stop]).data)
                for extra in (shard.documents, shard.supervised):
                    digest.update(b"-" if extra is None else np.ascontiguousarray(extra).data)
            self._identity = digest.hexdigest()
        return self._identity

    @property
    def max_token(self) -> int:
        """The largest id."""
        if self._max_token is None:
            self._max_token = max(
                int(shard.tokens[at : min(at + CHUNK, part.stop)].max())
                for shard, part in self._parts()
                for at in range(part.start, part.stop, CHUNK)
            )
        return self._max_token

    def whole(self) -> NDArray[Any]:
        """All tokens, (n,); a copy where there is more than one segment."""
        parts = [shard.tokens[segment.start : segment.stop] for shard, segment in self._parts()]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def part(self, start: int, count: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """`count` tokens from `start` on, which lie in one segment, and which are supervised (None: all).
        Both (count,), views."""
        number = bisect_right(self._first, start) - 1
        segment = self.segments[number]
        shard = self.shards[segment.shard]
        at = segment.start + start - self._first[number]
        mask = shard.supervised
        return shard.tokens[at : at + count], None if mask is None else mask[at : at + count]

    def count_supervised(self, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of the `counts` tokens from `starts` on are supervised; (d,) each, in order, each stretch
        inside one segment."""
        found = counts.copy()
        for number, (shard, segment) in enumerate(self._parts()):
            if shard.supervised is None:
                continue
            low, high = starts.searchsorted(self._edges[number : number + 2])
            sums = np.concatenate([[0], np.cumsum(shard.supervised[segment.start : segment.stop] != 0)])
            first = starts[low:high] - self._first[number]
            found[low:high] = sums[first + counts[low:high]] - sums[first]
        return found

    def _parts(self) -> Iterator[tuple[Shard, Segment]]:
        return ((self.shards[segment.shard], segment) for segment in self.segments)

    def windows(self, starts: NDArray[np.int64], length: int) -> Windows:
        """The stretches of `length` tokens from `starts` (R,) on; all inside the row."""
        spans = self._spans(starts, length)
        tokens = np.empty((len(starts), length), dtype=self.dtype)
        masked = self.shards[0].supervised is not None
        supervised = np.empty((len(starts), length), dtype=np.bool_) if masked else None
        for row, number, at, count, column in spans:
            shard = self.shards[number]
            tokens[row, column : column + count] = shard.tokens[at : at + count]
            if supervised is not None and shard.supervised is not None:
                supervised[row, column : column + count] = shard.supervised[at : at + count]
        if self._indexed:
            places = self._indexed_starts(spans, length)
        else:
            places = np.flatnonzero(tokens == self.end) + 1
            places = places[places % length != 0]
        if len(spans) > len(starts):
            joins = [row * length + column for row, _, _, _, column in spans if column]
            places = np.union1d(places, np.array(joins, dtype=np.int64))
        rows, columns = np.divmod(places, length)
        return Windows(tokens, supervised, rows, columns)

    def titled(self, start: int, count: int) -> list[str]:
        """What the documents in `count` tokens from `start` on are called; one that goes on in the next shard
        comes once."""
        spans = self._spans(np.array([start], dtype=np.int64), count)
        found = [name for _, shard, at, part, _ in spans for name in self.shards[shard].titled(at, part)]
        return list(dict.fromkeys(found))

    def _spans(self, starts: NDArray[np.int64], length: int) -> list[Span]:
        spans = []
        numbers = self._edges.searchsorted(starts, "right") - 1
        for row, (at, number) in enumerate(zip(starts.tolist(), numbers.tolist(), strict=True)):
            column = 0
            while column < length:
                segment = self.segments[number]
                first = segment.start + at + column - self._first[number]
                count = min(length - column, segment.stop - first)
                spans.append((row, segment.shard, first, count, column))
                column += count
                number += 1
        return spans

    def _indexed_starts(self, spans: list[Span], length: int) -> NDArray[np.int64]:
        """Places `row * length + column` of the documents that start inside a span, in order."""
        ends: dict[int, list[int]] = {}
        for _, number, at, count, _ in spans:
            ends.setdefault(number, []).extend((at + 1, at + count))
        indices = {number: self._index(number) for number in ends}
        edges = {number: iter(indices[number].searchsorted(ends[number]).tolist()) for number in ends}
        found = []
        for row, number, at, _, column in spans:
            low, high = next(edges[number]), next(edges[number])
            if low < high:
                found.append(indices[number][low:high] + (row * length + column - at))
        if not found:
            return np.empty(0, dtype=np.int64)
        places = np.concatenate(found)
        if (places[1:] > places[:-1]).all():
            return places
        return np.unique(places)  # a document without a token starts where the next one does

    def _index(self, number: int) -> NDArray[np.int64]:
        found = self.shards[number].documents
        assert found is not None
        return found

    def documents(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where each document starts in the row, and its tokens; (d,) each. Reads every token of a shard
        without an index; a document that a segment cuts counts with the part that is inside."""
        starts = np.concatenate(
            [
                _starts(shard, segment, self.end) + (first - segment.start)
                for (shard, segment), first in zip(self._parts(), self._first, strict=False)
            ]
        )
        return starts, np.diff(starts, append=len(self))


def _starts(shard: Shard, segment: Segment, end: int) -> NDArray[np.int64]:
    """Where documents start in a segment, counted in its shard."""
    if shard.documents is not None:
        offsets = shard.documents
        inside = offsets[offsets.searchsorted(segment.start, "right") : offsets.searchsorted(segment.stop)]
        return np.unique(np.concatenate([[segment.start], inside])).astype(np.int64)
    found = [np.array([segment.start], dtype=np.int64)]
    for at in range(segment.start, segment.stop, CHUNK):
        ends = np.flatnonzero(shard.tokens[at : min(at + CHUNK, segment.stop)] == end) + at + 1
        found.append(ends[ends < segment.stop])
    return np.concatenate(found)
