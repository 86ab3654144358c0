"""Sources whose samples are numbers, and streams over them, for the tests of data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_core.data.mixture import MixedSource, MixtureOrder
from forge_core.data.stream import SampleStream


class Numbers:
    """Sample i is the number `first` + i."""

    def __init__(self, n: int, first: int = 0, label: str = "numbers") -> None:
        self.n, self.first, self.fingerprint = n, first, f"{label}/{n}"

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {"tokens": np.array([self.first + index])}

    def batch(self, indices: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        return {"tokens": self.first + indices[:, None]}


class Flow:
    """A stream of the numbers `first` .. `first` + n - 1, each epoch in an order of its own, from `parts`
    files of as equal numbers as can be."""

    def __init__(self, n: int, first: int = 0, unrepeatable: str = "", parts: int = 1) -> None:
        self.n, self.first, self.unrepeatable, self.parts = n, first, unrepeatable, parts
        self.fingerprint, self.max_token = f"flow/{n}", None
        self.opened: list[int] = []
        self.read: list[int] = []

    def epoch(self, number: int, part: int = 0, parts: int = 1) -> Iterator[dict[str, Any]]:
        for value in np.random.default_rng(number).permutation(self.n).tolist():
            if value % parts == part:
                self.read.append(value)
                yield {"tokens": np.array([self.first + value]), "targets": np.array([value])}

    def at(self, position: int, part: int = 0, parts: int = 1) -> Iterator[dict[str, Any]]:
        self.opened.append(position)
        endless = itertools.chain.from_iterable(self.epoch(n, part, parts) for n in itertools.count())
        return itertools.islice(endless, position, None)

    def once(self) -> Iterator[dict[str, Any]]:
        return self.epoch(0)

    def close(self) -> None:
        pass


def mixture(
    weights: Mapping[str, float],
    sizes: Mapping[str, int | None],
    *,
    seed: int = 0,
    phases: Sequence[tuple[int, Mapping[str, float]]] = (),
    epochs: Mapping[str, int] | None = None,
    global_batch: int = 1,
) -> MixtureOrder:
    """An order over sources called as the keys of `sizes`."""
    limits = epochs or {}
    sources = [MixedSource(name=n, samples=size, epochs=limits.get(n)) for n, size in sizes.items()]
    stages = [(1, weights), *phases]
    shares = [(update, [given.get(name, 0.0) for name in sizes]) for update, given in stages]
    return MixtureOrder(sources, shares, seed, global_batch=global_batch)


def mixed_stream(
    order: MixtureOrder, *, batch_size: int, sources: Any = None, **arguments: Any
) -> SampleStream:
    """A stream in that order; source number s holds the numbers from 1000 s on."""
    made = [Numbers(each.samples or 0, first=1000 * i) for i, each in enumerate(order.sources)]
    return SampleStream(sources or made, order, batch_size=batch_size, **arguments)


def ids(stream: SampleStream, count: int) -> list[list[int]]:
    """The numbers of a step, by micro-batch."""
    return [batch["tokens"][:, 0].tolist() for batch in stream.take(count)]


def global_step(streams: Sequence[SampleStream], count: int) -> list[int]:
    """The samples of one step in their global order: micro-batch by micro-batch, rank by rank."""
    parts = [ids(stream, count) for stream in streams]
    return [i for m in range(count) for rank in parts for i in rank[m]]
