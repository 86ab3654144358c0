"""Samples drawn at random: the same whatever reads them, again after a restart, others in the next epoch."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest
import torch
from datakit import Flow, Numbers, mixed_stream, mixture

from forge_core.data.draws import global_generators, global_states, sample_generator
from forge_core.data.evaluation import HoldoutSet
from forge_core.data.inspection import some_samples
from forge_core.data.order import ShuffledOrder, StreamOrder
from forge_core.data.stream import SampleStream
from forge_core.errors import DataError


class Drawing:
    """Each sample holds its number, and a draw of its generator and of each global one."""

    def __init__(self, n: int, first: int = 0, libraries: bool = True) -> None:
        self.n, self.first, self.libraries, self.fingerprint = n, first, libraries, f"drawing/{n}"

    def __len__(self) -> int:
        return self.n

    def draw(self, index: int, generator: np.random.Generator) -> Mapping[str, Any]:
        drawn = [generator.random()]
        if self.libraries:
            with global_generators(generator):
                drawn += [random.random(), np.random.random(), float(torch.rand((), dtype=torch.float64))]
        return {"tokens": np.array([self.first + index]), "drawn": np.array([*drawn, generator.random()])}


class Undeclared(Numbers):
    """Draws from a global generator without a word."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {"tokens": np.array([index]), "drawn": np.array([random.random()])}

    batch = None  # type: ignore[assignment]


class DrawingFlow(Flow):
    """A stream that draws, by the position of each sample and its part."""

    def at(self, position: int, part: int = 0, parts: int = 1) -> Iterator[dict[str, Any]]:
        for number, sample in enumerate(super().at(position, part, parts), position):
            drawn = sample_generator(0, "flow", part, number).random(5)
            yield {"tokens": sample["tokens"], "drawn": drawn}


Row = tuple[int, ...]


def rows(streams: list[SampleStream], count: int) -> list[Row]:
    """Number and draws of the samples of a step, in their global order."""
    parts = [stream.take(count) for stream in streams]
    return [
        (int(rank[m]["tokens"][row, 0]), *rank[m]["drawn"][row].tolist())
        for m in range(count)
        for rank in parts
        for row in range(len(rank[m]["tokens"]))
    ]


def shuffled(n: int, *, workers: int = 0, batch_size: int = 2, **arguments: Any) -> SampleStream:
    order = ShuffledOrder(n, 0)
    return SampleStream([Drawing(n)], order, batch_size=batch_size, workers=workers, **arguments)


def mixed(batch_size: int, rank: int = 0, ranks: int = 1, workers: int = 0) -> SampleStream:
    """Two sources that draw and a stream that does, epochs of 12 and 10, shares that change."""
    order = mixture(
        {"a": 3, "b": 1, "flow": 1},
        {"a": 12, "b": 10, "flow": None},
        phases=[(5, {"a": 1, "b": 2, "flow": 1})],
        global_batch=8,
    )
    sources = [Drawing(12), Drawing(10, first=100), DrawingFlow(9, first=200)]
    return mixed_stream(
        order,
        batch_size=batch_size,
        sources=sources,
        data_rank=rank,
        data_size=ranks,
        global_batch=8,
        workers=workers,
    )


def straight(updates: int) -> list[list[Row]]:
    stream = mixed(8)
    return [rows([stream], 1) for _ in range(updates)]


@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers_draws_the_same(workers: int) -> None:
    with closing(shuffled(10)) as plain, closing(shuffled(10, workers=workers)) as read:
        for count in (1, 1, 2, 2, 1, 5, 1, 1):  # three epochs, which end inside steps
            random.random(), np.random.random(), torch.rand(())  # what training draws meanwhile
            assert rows([read], count) == rows([plain], count)


def test_each_epoch_draws_anew_and_each_sample_its_own() -> None:
    stream = shuffled(12)
    epochs = [{row[0]: row[1:] for row in rows([stream], 6)} for _ in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    draws = [number for epoch in epochs for drawn in epoch.values() for number in drawn]
    assert len(draws) == len(set(draws)) == 3 * 12 * 5


def test_draws_depend_on_seed_source_epoch_and_sample_alone() -> None:
    """Whatever comes before a sample of an epoch: another order of the same source gives the same draws."""
    (batch,) = SampleStream([Drawing(6)], ShuffledOrder(6, 0, label="a"), batch_size=6).take(1)
    pairs = zip(batch["tokens"][:, 0].tolist(), batch["drawn"].tolist(), strict=True)
    expected = {i: Drawing(6).draw(i, sample_generator(0, "a", 0, i))["drawn"].tolist() for i in range(6)}
    assert dict(pairs) == expected
    for seed, name, epoch in ((1, "a", 0), (0, "b", 0), (0, "a", 1)):
        other = sample_generator(seed, name, epoch, 0)
        assert Drawing(6).draw(0, other)["drawn"].tolist() != expected[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("saved_after", [1, 4, 7])
def test_a_run_that_goes_on_draws_what_the_other_would_have_drawn(workers: int, saved_after: int) -> None:
    expected = straight(12)
    with closing(mixed(8, workers=workers)) as first, closing(mixed(4, workers=workers)) as again:
        assert [rows([first], 1) for _ in range(saved_after)] == expected[:saved_after]
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        again.load_state_dict(first.state_dict())
        assert [rows([again], 2) for _ in range(12 - saved_after)] == expected[saved_after:]


def test_any_number_of_ranks_draws_the_same_also_when_it_changes() -> None:
    expected = straight(20)
    state: Any = None
    seen = []
    for ranks, batch_size, count, updates in ((4, 1, 2, 5), (2, 2, 2, 4), (1, 4, 2, 6), (2, 4, 1, 5)):
        streams = [mixed(batch_size, rank, ranks) for rank in range(ranks)]
        for stream in streams:
            if state is not None:
                stream.load_state_dict(state)
        seen += [rows(streams, count) for _ in range(updates)]
        state = streams[0].state_dict()
    assert seen == expected
    for first in (0, 100, 200):  # each source came to its second epoch, with other draws
        mine = [row for step in expected for row in step if first <= row[0] < first + 100]
        assert len({row[0] for row in mine}) < len({row[1] for row in mine}) == len(mine)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_stream_in_parts_draws_the_same_on_any_number_of_ranks(ranks: int) -> None:
    def make(size: int) -> list[SampleStream]:
        return [
            SampleStream(
                [DrawingFlow(24, parts=4)],
                StreamOrder(),
                batch_size=8 // size,
                data_rank=rank,
                data_size=size,
                global_batch=8,
            )
            for rank in range(size)
        ]

    whole, split, again = make(1), make(ranks), make(1)
    expected = [rows(whole, 1) for _ in range(8)]
    assert len({row[1] for step in expected for row in step}) == 64
    assert [rows(split, 1) for _ in range(3)] == expected[:3]
    again[0].load_state_dict(split[0].state_dict())
    assert [rows(again, 1) for _ in range(5)] == expected[3:]


def test_what_training_draws_is_left_alone() -> None:
    stream = shuffled(8)
    before = global_states()
    stream.take(3)
    assert global_states() == before
    with suppress(KeyError), global_generators(sample_generator(0, "a")):
        random.random(), np.random.random(), torch.rand(())
        raise KeyError
    assert global_states() == before


def test_reading_ahead_on_a_thread_draws_the_same_but_never_seeds_global_generators() -> None:
    def make(libraries: bool, prefetch: bool) -> SampleStream:
        source = Drawing(10, libraries=libraries)
        return SampleStream([source], ShuffledOrder(10, 0), batch_size=2, prefetch=prefetch)

    with closing(make(False, True)) as ahead, closing(make(False, False)) as plain:
        assert [rows([ahead], 1) for _ in range(7)] == [rows([plain], 1) for _ in range(7)]
    with closing(make(True, True)) as ahead:
        ahead.take(1)
        with pytest.raises(DataError, match="cannot be seeded for a sample on a thread") as caught:
            ahead.take(1)
    assert "data.num_workers = 1" in caught.value.hint


def test_an_evaluation_draws_the_same_every_time_on_any_number_of_ranks() -> None:
    def evaluated(ranks: int, seed: int = 3) -> list[Row]:
        sets = [
            HoldoutSet("h", Drawing(12), batch_size=12 // ranks, data_rank=r, data_size=ranks, seed=seed)
            for r in range(ranks)
        ]
        return [
            (int(b["tokens"][i, 0]), *b["drawn"][i].tolist())
            for held in sets
            for b in held
            for i in range(len(b["tokens"]))
        ]

    assert evaluated(1) == evaluated(1) == evaluated(2) == evaluated(3)
    assert [row[1] for row in evaluated(1)] != [row[1] for row in evaluated(1, seed=4)]


def test_samples_that_are_looked_at_are_drawn() -> None:
    found = {number: sample["drawn"].tolist() for number, sample in some_samples(Drawing(5), 2, "a", 3)}
    assert found == {i: Drawing(5).draw(i, sample_generator(3, "a", 0, i))["drawn"].tolist() for i in (0, 4)}


def test_a_sample_that_cannot_be_drawn_is_named() -> None:
    class Broken(Drawing):
        def draw(self, index: int, generator: np.random.Generator) -> Mapping[str, Any]:
            if index == 5:
                raise OSError("disk gone")
            return super().draw(index, generator)

    stream = SampleStream([Broken(8)], ShuffledOrder(8, 0), batch_size=8)
    with pytest.raises(DataError, match=r"source data: cannot read sample 5: OSError: disk gone"):
        stream.take(1)


def test_a_source_that_draws_without_a_word_is_told_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def warned(source: Any) -> int:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "forge.data"):
            stream = SampleStream([source], ShuffledOrder(8, 0), batch_size=2)
            stream.take(1), stream.take(1)
        found = [record for record in caplog.records if "global random generators" in record.message]
        return len(found)

    assert warned(Undeclared(8)) == 1
    assert warned(Drawing(8)) == warned(Numbers(8)) == 0


def test_generators_of_samples_are_unrelated() -> None:
    many = [
        sample_generator(seed, name, *numbers).random()
        for seed, name in itertools.product((0, 1, 2**63), ("", "a", "1", "a/1"))
        for numbers in ((), (0,), (1,), (0, 1), (1, 0), (1, 1), (11,))
    ]
    assert len(set(many)) == len(many)
    # what a run drew must not change under it with a new release
    assert sample_generator(7, "a", 1, 2).bit_generator.random_raw() == 702822826728725304
