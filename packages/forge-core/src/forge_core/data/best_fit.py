"""Documents put together to sequences so that few are cut and little is left over.

Best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973), as Ding et al., "Fewer Truncations
Improve Language Modeling" (ICML 2024), use it: documents longer than a sequence are cut into pieces of its
length; pieces, longest first, each go where they leave the least room.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import defaultdict
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from forge_core.data.packing import RowSource, number_documents
from forge_core.data.row import TokenRow
from forge_core.data.source import Arrays
from forge_core.data.wording import counted
from forge_core.errors import DataError
from forge_core.loss.shift import IGNORE, next_token_targets

MUCH = 0.05
"""Share of positions that is told where only warnings are shown."""
TooLong = Literal["split", "cut", "drop"]
_log = logging.getLogger("forge.data")


def best_fit_decreasing(lengths: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """The bin of each piece.

    Pieces of one length, and bins with one room left, are each treated together, so that the time is that of
    sorting and of a number of steps that depends on `room`, not on how many pieces there are.

    Args:
        lengths: (n,), each 1 .. room.
        room: of a bin.

    Returns:
        (n,) int64, bins numbered from 0 in the order in which they were opened.
    """
    bins = np.empty(len(lengths), dtype=np.int64)
    # numpy sorts numbers of 16 bits by counting, several times as fast
    narrow = np.uint16 if room <= np.iinfo(np.uint16).max else np.int64
    order = np.argsort((room - lengths).astype(narrow), kind="stable")
    counted_by_size = np.bincount(lengths, minlength=1)
    sizes = np.flatnonzero(counted_by_size)[::-1]
    left: dict[int, list[NDArray[np.int64]]] = defaultdict(list)
    rooms: list[int] = []
    opened = done = 0
    for size, count in zip(sizes.tolist(), counted_by_size[sizes].tolist(), strict=True):
        while count:
            at = bisect_left(rooms, size)
            if at < len(rooms):
                space = rooms.pop(at)
                found = np.concatenate(left.pop(space))
            else:
                space = room
                found = np.arange(opened, opened - (-count // (room // size)))
                opened += len(found)
            each = space // size
            full = min(len(found), count // each)
            rest = count % each if full < len(found) else 0
            placed = np.concatenate([np.repeat(found[:full], each), np.repeat(found[full : full + 1], rest)])
            bins[order[done : done + len(placed)]] = placed
            done += len(placed)
            count -= len(placed)
            used = full + bool(rest)
            _keep(rooms, left, space - each * size, found[:full])
            _keep(rooms, left, space - rest * size, found[full:used])
            _keep(rooms, left, space, found[used:])
    return bins


def _keep(
    rooms: list[int], left: dict[int, list[NDArray[np.int64]]], space: int, bins: NDArray[np.int64]
) -> None:
    if space and len(bins):
        if space not in left:
            insort(rooms, space)
        left[space].append(bins)


class BestFitTokens(RowSource):
    """Samples of S tokens put together from documents, and pieces of those that are longer.

    A piece that is cut from a document has the document's next token as its last target, so that each token
    of a document but its first is a target once. What would hold no target (a document of one token, a last
    piece of one) is left out. Room that is left over is filled with the token `end` as a document of its own,
    without targets. Keeps 20 bytes a piece in memory.

    Args:
        row: the documents. seq_len: S. name: in messages.
        too_long: what becomes of a document of more than S tokens: "split" into pieces; "cut", its start is
            kept; "drop". With the last two, documents in which nothing is learnt are left out, too, and both
            are counted in the log.

    Raises:
        DataError: no document with a target.
    """

    def __init__(
        self, row: TokenRow, *, seq_len: int, name: str = "text", too_long: TooLong = "split"
    ) -> None:
        super().__init__(row, seq_len, True, f"best_fit/{too_long}")
        if too_long == "split":
            starts, lengths, continued = cut_documents(*row.documents(), seq_len)
        else:
            starts, lengths, continued = _whole_documents(row, seq_len, too_long, name)
        if not len(starts):
            tokens = counted(len(row), "token")
            raise DataError(
                f"{name}: no document of {tokens} has anything to learn in {seq_len} tokens",
                "give more data, or raise train.seq_len",
            )
        bins = best_fit_decreasing(lengths, seq_len)
        order = np.argsort(bins, kind="stable")
        self._starts, self._lengths = starts[order], lengths[order].astype(np.int32)
        self._continued = continued[order]
        self._samples = int(bins.max()) + 1
        self._first = np.searchsorted(bins[order], np.arange(self._samples + 1))
        self.padding = 1 - int(lengths.sum()) / (self._samples * seq_len)
        _log.log(
            logging.WARNING if self.padding > MUCH else logging.INFO,
            "%s: %s of %d tokens from %s of documents, %.2f %% left over%s",
            name,
            counted(self._samples, "sequence"),
            seq_len,
            counted(len(starts), "piece"),
            100 * self.padding,
            _advice(self._samples, too_long) if self.padding > MUCH else "",
        )

    @property
    def tokens_per_sample(self) -> float:
        """Mean tokens of a sample without what is left over."""
        return self._length * (1 - self.padding)

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Samples `indices` (R,): tokens, targets, positions (R, S) int64, documents (R, S) int32, valid
        (R, S) bool, False for padding."""
        length, count = self._length, len(indices)
        low, high = self._first[indices], self._first[indices + 1]
        pieces = np.concatenate([np.arange(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True)])
        sizes = self._lengths[pieces].astype(np.int64)
        places = self._places(high - low, sizes, length)
        filled = np.add.reduceat(sizes, np.cumsum(high - low) - (high - low))
        gaps = np.arange(count) * length + filled
        tokens = np.empty(count * length, dtype=np.int64)
        for gap, row in zip(gaps.tolist(), range(count), strict=True):
            tokens[gap : (row + 1) * length] = self.row.end
        labels, following = self._copy(tokens, pieces, places, sizes)
        targets = next_token_targets(labels.reshape(count, length)).reshape(-1)
        starts = np.concatenate([places, gaps[filled < length]])
        starts = starts[starts % length != 0]
        targets[starts - 1] = IGNORE
        for gap, row in zip(gaps.tolist(), range(count), strict=True):
            targets[gap : (row + 1) * length] = IGNORE
        targets[(places + sizes - 1)[self._continued[pieces]]] = following
        positions, documents = number_documents(starts, count, length)
        return {
            "tokens": tokens.reshape(count, length),
            "targets": targets.reshape(count, length),
            "positions": positions,
            "documents": documents,
            "valid": np.arange(length) < filled[:, None],
        }

    def _copy(
        self,
        tokens: NDArray[np.int64],
        pieces: NDArray[np.int64],
        places: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], list[int]]:
        """Fill the flattened batch with its pieces; the labels (where all is learnt, the tokens), and what
        follows each piece whose document goes on."""
        labels = tokens if self.row.shards[0].supervised is None else tokens.copy()
        following = []
        for piece, at, size, more in zip(
            self._starts[pieces].tolist(),
            places.tolist(),
            sizes.tolist(),
            self._continued[pieces].tolist(),
            strict=True,
        ):
            part, learnt = self.row.part(piece, size + more)
            tokens[at : at + size] = part[:size]
            if learnt is not None:
                labels[at : at + size] = _masked(part, learnt)[:size]
            if more:
                following.append(int(part[-1]) if learnt is None or learnt[-1] else IGNORE)
        return labels, following

    def stretches(self, index: int) -> list[tuple[int, int]]:
        pieces = slice(int(self._first[index]), int(self._first[index + 1]))
        return list(zip(self._starts[pieces].tolist(), self._lengths[pieces].tolist(), strict=True))

    @staticmethod
    def _places(counts: NDArray[np.int64], sizes: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Where each piece begins in the flattened batch: behind the pieces before it in its row."""
        before = np.cumsum(sizes) - sizes
        first = before[np.cumsum(counts) - counts]
        places: NDArray[np.int64] = before + np.repeat(np.arange(len(counts)) * length - first, counts)
        return places


def _masked(tokens: NDArray[Any], supervised: NDArray[Any]) -> NDArray[np.int64]:
    masked: NDArray[np.int64] = np.where(supervised, tokens.astype(np.int64), IGNORE)
    return masked


def _advice(samples: int, too_long: TooLong) -> str:
    """What leaves less; a single sequence has no second one to share its room with."""
    length = "a shorter train.seq_len or more data" if samples == 1 else "a longer train.seq_len"
    other = ' or data.packing = "concatenate"' if too_long == "split" else ""
    return f"; {length}{other} leaves less"


def _whole_documents(
    row: TokenRow, most: int, too_long: TooLong, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """As `cut_documents`, at most one piece of each document, and only those in which something is learnt."""
    starts, lengths = row.documents()
    longer = lengths > most
    if longer.any():
        what = {"cut": "cut to their start", "drop": "left out"}[too_long]
        _log.warning(
            "%s: %d of %d documents are longer than %d tokens and %s",
            name,
            longer.sum(),
            len(longer),
            most,
            what,
        )
    if too_long == "drop":
        starts, lengths, longer = starts[~longer], lengths[~longer], longer[~longer]
    kept = np.minimum(lengths, most)
    learnt = row.count_supervised(starts + 1, kept - 1 + longer) > 0
    if not learnt.all():
        _log.warning("%s: nothing is learnt in %s; left out", name, counted(int((~learnt).sum()), "document"))
    return starts[learnt], kept[learnt], longer[learnt]


def cut_documents(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Pieces of at most `most` tokens, without those that hold no target.

    Returns:
        start in the row and tokens of each piece, and whether its document goes on behind it.
    """
    counts = -(-lengths // most)
    total = int(counts.sum())
    number = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    pieces = np.repeat(starts, counts) + number * most
    rest = np.repeat(lengths, counts) - number * most
    continued = rest > most
    kept = rest > 1
    return pieces[kept], np.minimum(rest, most)[kept], continued[kept]
