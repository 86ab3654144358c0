"""Which part of a corpus of tokens is held out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from forge_core.data.row import CHUNK, Segment, Shard

Edges = NDArray[np.int64]
"""Where each shard starts among all tokens, and their number."""
STRETCHES = 64
LEAST = 1 << 14
"""Tokens that each held-out part should have; a small corpus has fewer parts."""


def split_shards(shards: Sequence[Shard], holdout: float, end: int) -> tuple[list[Segment], list[Segment]]:
    """Segments to train on and segments held out, both in the order of the shards.

    The corpus is cut into up to 64 stretches of equal length, and the last documents of each, with the share
    `holdout` of its tokens, are held out: whole documents, spread over the corpus, by a rule that needs no
    seed and depends on nothing but the corpus. A stretch that ends with a document longer than half of it is
    cut in the middle of that.

    Args:
        shards: none empty.
        holdout: share of the tokens, 0 <= holdout < 1.
        end: id that ends a document, for shards without an index.
    """
    edges = np.cumsum([0, *(len(shard.tokens) for shard in shards)])
    total = int(edges[-1])
    if holdout <= 0:
        return _segments(edges, 0, total), []
    count = min(STRETCHES, max(1, int(total * holdout) // LEAST))
    # the place of a cut must not depend on the length of a sequence, or another run would train on it
    bounds = [_next_document(shards, edges, k * total // count, end) for k in range(count)] + [total]
    train: list[Segment] = []
    held: list[Segment] = []
    for low, high in pairwise(bounds):
        if high > low:
            cut = _cut(shards, edges, low, high, holdout, end)
            train += _segments(edges, low, cut)
            held += _segments(edges, cut, high)
    return train, held


def _cut(shards: Sequence[Shard], edges: Edges, low: int, high: int, holdout: float, end: int) -> int:
    """Where the held-out part of the stretch low .. high - 1 starts: with the first document of that part,
    else with the last document of the stretch if that is at most half of it, else in its middle."""
    wanted = high - max(1, int((high - low) * holdout))
    after = _next_document(shards, edges, wanted, end)
    if after < high:
        return after
    middle = (low + high) // 2
    before = found = _next_document(shards, edges, middle, end)
    while found < wanted:
        before, found = found, _next_document(shards, edges, found + 1, end)
    return before if middle <= before < wanted else wanted


def _segments(edges: Edges, low: int, high: int) -> list[Segment]:
    """Tokens low .. high - 1 of all shards."""
    found = []
    for number, (first, last) in enumerate(pairwise(edges.tolist())):
        start, stop = max(low, first), min(high, last)
        if start < stop:
            found.append(Segment(number, start - first, stop - first))
    return found


def _next_document(shards: Sequence[Shard], edges: Edges, at: int, end: int) -> int:
    """The first place >= at where a document starts; the end of the corpus if there is none."""
    number = int(edges.searchsorted(at, "right")) - 1
    if number >= len(shards) or at == edges[number]:
        return at
    shard, local = shards[number], at - int(edges[number])
    if shard.documents is not None:
        return int(edges[number] + shard.documents[shard.documents.searchsorted(local)])
    for begin in range(local - 1, len(shard.tokens), CHUNK):
        ends = np.flatnonzero(shard.tokens[begin : begin + CHUNK] == end)
        if len(ends):
            return int(edges[number]) + begin + int(ends[0]) + 1
    return int(edges[number + 1])
