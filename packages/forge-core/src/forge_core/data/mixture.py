"""The order of a mixture: each source at its own pace, each with its own cursor, under changing shares."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_core.data.order import BLOCK, ShuffledOrder, Start, StreamOrder, ended
from forge_core.data.permute import permutation_key
from forge_core.data.rotation import CIRCLE, Rotation, arcs


@attrs.frozen(kw_only=True)
class MixedSource:
    """What the order needs to know of a source.

    Attributes:
        name: unique; together with the seed it settles the order of the source's samples, so that sources
            may be added, removed and moved.
        samples: of an epoch, at least 1; None for a stream, which has an order of its own.
        epochs: passes after which it is not drawn any more, None for no limit.
    """

    name: str
    samples: int | None
    epochs: int | None = None

    @property
    def limit(self) -> int | None:
        """Draws until it is used up."""
        return None if self.epochs is None or self.samples is None else self.epochs * self.samples


@attrs.frozen(kw_only=True)
class Segment:
    """A stretch of the run in which the shares stay the same.

    Attributes:
        start, end: positions; end is None for the last one of an endless run.
        rotation: of draws since position 0.
        drawn: of each source, before `start`.
        before: draws of the rotation before `start`.
    """

    start: int
    end: int | None
    rotation: Rotation
    drawn: tuple[int, ...]
    before: tuple[int, ...]

    def drawn_at(self, position: int) -> tuple[int, ...]:
        """Draws of each source before `position`, which lies in the segment."""
        now = self.rotation.drawn(position)
        return tuple(d + n - b for d, n, b in zip(self.drawn, now, self.before, strict=True))


class MixtureOrder:
    """The order of samples drawn from several sources.

    The source of draw k is a function of the seed, of k and of the shares at k; the sample is the source's
    next one, in the order of its epoch, wherever the source was drawn before. Other shares therefore repeat
    and drop nothing. Memory does not grow with the samples, and any position is found in O(log position).

    Args:
        sources: at least one.
        phases: (first update, share of each source), by rising update; the first begins with update 1.
        seed: of the orders and of the draws.
        global_batch: samples of an update, which say where phases begin.
        start: where the run goes on under these shares, by default its beginning.
    """

    def __init__(
        self,
        sources: Sequence[MixedSource],
        phases: Sequence[tuple[int, Sequence[float]]],
        seed: int,
        *,
        global_batch: int = 1,
        start: Start | None = None,
    ) -> None:
        self.sources, self.seed = tuple(sources), seed
        self._phases = tuple((update, tuple(shares)) for update, shares in phases)
        self._global_batch = global_batch
        self._orders = [
            StreamOrder(i) if source.samples is None else ShuffledOrder(source.samples, seed, source.name, i)
            for i, source in enumerate(sources)
        ]
        self.start = start or Start()
        self._offset = permutation_key(seed, 0, "mixture")[0] % CIRCLE
        self._segments = self._divide()
        self._block_at = -1
        self._block: tuple[NDArray[np.int64], NDArray[np.int64]] = self._read(0, 0)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    @property
    def end(self) -> int | None:
        """Position at which every source of the last phase is used up; None if that never happens."""
        return self._segments[-1].end if self._segments else self.start.position

    @property
    def epoch_size(self) -> int | None:
        """Samples of the phase that draws from the fewest; None where a stream takes part in each."""
        sizes = [self._size(shares) for _, shares in self._phases]
        known = [size for size in sizes if size is not None]
        return min(known) if known else None

    def _size(self, shares: Sequence[float]) -> int | None:
        total = 0
        for source, share in zip(self.sources, shares, strict=True):
            if share > 0:
                if source.samples is None:
                    return None
                total += source.samples
        return total

    def rebased(self, start: Start) -> MixtureOrder:
        """The same shares from `start` on. Its cursors are those of a run that came there otherwise."""
        return MixtureOrder(
            self.sources, self._phases, self.seed, global_batch=self._global_batch, start=start
        )

    def drawn(self, position: int) -> dict[str, int]:
        """Samples that each source has given before `position`."""
        if not self._segments or position <= self.start.position:
            return {name: self.start.drawn.get(name, 0) for name in self.names}
        return dict(zip(self.names, self._segment(position - 1).drawn_at(position), strict=True))

    def at(self, position: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `SampleOrder.at`; O(count + log position) time."""
        if self.end is not None and position + count > self.end:
            raise ended(position, count, self.end)
        parts = []
        while count:
            block, inside = divmod(position, BLOCK)
            if self._block_at != block:
                self._block, self._block_at = self._read_block(block), block
            skipped = max(self.start.position - block * BLOCK, 0)
            which, indices = (a[inside - skipped : inside - skipped + count] for a in self._block)
            parts.append((which, indices))
            position, count = position + len(which), count - len(which)
        if len(parts) == 1:
            return parts[0][0].copy(), parts[0][1].copy()
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _read_block(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The draws of a block, without those before the start and after the end."""
        first, last = max(block * BLOCK, self.start.position), (block + 1) * BLOCK
        return self._read(first, last if self.end is None else min(last, self.end))

    def _read(self, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        which = np.empty(max(last - first, 0), dtype=np.int64)
        indices = np.empty_like(which)
        position = first
        while position < last:
            segment = self._segment(position)
            stop = last if segment.end is None else min(last, segment.end)
            here = which[position - first : stop - first]
            here[:] = segment.rotation.sources(position, stop - position)
            drawn = segment.drawn_at(position)
            for number in np.unique(here):
                mine = np.flatnonzero(here == number) + (position - first)
                indices[mine] = self._orders[number].at(drawn[number], len(mine))[1]
            position = stop
        return which, indices

    def _segment(self, position: int) -> Segment:
        return next(s for s in reversed(self._segments) if s.start <= position)

    def _divide(self) -> list[Segment]:
        """All stretches of equal shares: a phase begins one, and so does a source that is used up."""
        segments: list[Segment] = []
        position = self.start.position
        drawn = tuple(self.start.drawn.get(name, 0) for name in self.names)
        while True:
            shares, boundary = self._phase_at(position)
            left = [self._left(i, drawn[i]) for i in range(len(self.sources))]
            shares = tuple(0.0 if rest == 0 else share for share, rest in zip(shares, left, strict=True))
            if not any(shares):
                return segments
            rotation = Rotation(arcs(shares), self._offset)
            segment = Segment(
                start=position, end=None, rotation=rotation, drawn=drawn, before=rotation.drawn(position)
            )
            limits = [rest if share else None for share, rest in zip(shares, left, strict=True)]
            end = first_exhausted(segment, limits, boundary)
            segments.append(attrs.evolve(segment, end=end))
            if end is None:
                return segments
            drawn, position = segment.drawn_at(end), end

    def _left(self, source: int, drawn: int) -> int | None:
        limit = self.sources[source].limit
        return None if limit is None else max(limit - drawn, 0)

    def _phase_at(self, position: int) -> tuple[tuple[float, ...], int | None]:
        """Shares at a position, and where the next phase begins."""
        begun = self.start.position - self.start.update * self._global_batch  # where update 1 would have been
        starts = [begun + (update - 1) * self._global_batch for update, _ in self._phases]
        number = max(bisect_right(starts, position) - 1, 0)
        return self._phases[number][1], starts[number + 1] if number + 1 < len(starts) else None


def first_exhausted(segment: Segment, left: Sequence[int | None], boundary: int | None) -> int | None:
    """Where a segment ends: at `boundary`, or behind the draw that uses a source up if that comes first.

    Args:
        segment: its start and rotation.
        left: draws that each source has left, None for no limit.
        boundary: start of the next phase, None if there is none.
    """

    def used_up(position: int) -> bool:
        drawn = segment.drawn_at(position)
        return any(
            rest is not None and now - before >= rest
            for rest, now, before in zip(left, drawn, segment.drawn, strict=True)
        )

    if all(rest is None for rest in left):
        return boundary
    low, step = segment.start, 1  # nothing is used up at `low`
    while not used_up(low + step):
        low, step = low + step, step * 2
        if boundary is not None and low >= boundary:
            return boundary
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if used_up(middle) else (middle, high)
    return high if boundary is None else min(high, boundary)


def shares_of(
    weights: Sequence[float], lengths: Sequence[float], *, temperature: float = 1.0
) -> tuple[float, ...]:
    """Share of the draws that each source gets.

    Weights w become w ** (1 / temperature), as shares of tokens; a source whose samples are twice as long is
    drawn half as often for the same share.

    Args:
        weights: not negative, not all 0.
        lengths: mean tokens of a sample of each source; equal numbers for weights of samples.
        temperature: above 0.
    """
    largest = max(weights)
    warmed = [(weight / largest) ** (1.0 / temperature) if weight > 0 else 0.0 for weight in weights]
    draws = [warm / length for warm, length in zip(warmed, lengths, strict=True)]
    total = sum(draws)
    return tuple(draw / total for draw in draws)


def phase_shares(
    names: Sequence[str],
    first: Sequence[float],
    phases: Sequence[tuple[int, Mapping[str, float]]],
    lengths: Sequence[float],
    temperature: float,
) -> list[tuple[int, tuple[float, ...]]]:
    """Shares of the run and of its phases, each with the update that is the first under them.

    Args:
        names, first: the sources and their weights before any phase.
        phases: (first update, weights by name); without weights those before the phase stay.
        lengths, temperature: see `shares_of`.
    """
    found: list[tuple[int, tuple[float, ...]]] = []
    for step, weights in [(1, dict(zip(names, first, strict=True))), *phases]:
        if not weights:
            continue
        shares = shares_of([weights.get(n, 0.0) for n in names], lengths, temperature=temperature)
        if found and found[-1][0] == step:  # a phase from the first update on
            found.pop()
        found.append((step, shares))
    return found
