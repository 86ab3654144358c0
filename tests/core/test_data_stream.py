"""One global position: the same samples in the same order on any ranks, micro-batches and restarts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from forge_core.data.collate import read_rows
from forge_core.data.order import ShuffledOrder, Start
from forge_core.data.packing import PackedTokens
from forge_core.data.stream import SampleStream
from forge_core.errors import DataError


class Numbers:
    """Sample i is the number i, one by one, and its reads are recorded."""

    def __init__(self, n: int, first: int = 0, label: str = "numbers") -> None:
        self.n, self.first, self.fingerprint = n, first, f"{label}/{n}"
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        self.reads.append(index)
        return {"tokens": np.array([self.first + index])}


class BatchedNumbers(Numbers):
    def batch(self, indices: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        self.reads += indices.tolist()
        return {"tokens": self.first + indices[:, None]}

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        raise AssertionError("batch() is there to be used")


class TwoSources:
    """Samples alternate between two sources."""

    epoch_size, end, seed, start, names = 100, None, 0, Start(), ("even", "odd")

    def at(self, position: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        g = np.arange(position, position + count)
        return g % 2, g // 2

    def drawn(self, position: int) -> dict[str, int]:
        return {"even": (position + 1) // 2, "odd": position // 2}

    def rebased(self, start: Start) -> TwoSources:
        return self


def make_stream(n: int, *, seed: int = 0, source: Any = None, **arguments: Any) -> SampleStream:
    return SampleStream([source or BatchedNumbers(n)], ShuffledOrder(n, seed), **arguments)


def ids(stream: SampleStream, count: int) -> list[list[int]]:
    return [batch["tokens"][:, 0].tolist() for batch in stream.take(count)]


def global_step(streams: list[SampleStream], count: int) -> list[int]:
    """The samples of one step in their global order: micro-batch by micro-batch, rank by rank."""
    parts = [ids(stream, count) for stream in streams]
    return [i for m in range(count) for rank in parts for i in rank[m]]


def test_every_epoch_holds_each_sample_once_in_an_order_of_its_own() -> None:
    ranks = [make_stream(20, batch_size=1, data_rank=r, data_size=2) for r in range(2)]
    orders = []
    for _ in range(3):
        seen = [[ids(stream, 1)[0][0] for _ in range(10)] for stream in ranks]
        assert not set(seen[0]) & set(seen[1])
        assert sorted(seen[0] + seen[1]) == list(range(20))
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    again = [make_stream(20, batch_size=1, data_rank=r, data_size=2) for r in range(2)]
    assert [[ids(s, 1)[0][0] for _ in range(10)] for s in again] == orders[0]
    other = [make_stream(20, seed=1, batch_size=1, data_rank=r, data_size=2) for r in range(2)]
    assert [[ids(s, 1)[0][0] for _ in range(10)] for s in other] != orders[0]


def test_ranks_of_one_data_rank_read_the_same() -> None:
    first, second = (make_stream(20, batch_size=2, data_rank=1, data_size=2) for _ in range(2))
    assert [ids(first, 2) for _ in range(9)] == [ids(second, 2) for _ in range(9)]


def test_short_window_is_carried_into_the_next_epoch() -> None:
    """Five micro-batches and accumulation 2: two epochs are exactly five full updates."""
    stream = make_stream(5, batch_size=1)
    seen: list[int] = []
    updates = 0
    while stream.position < 2 * 5:
        batches = ids(stream, 2)
        assert len(batches) == 2
        seen += [i for batch in batches for i in batch]
        updates += 1
    assert updates == 5
    assert sorted(seen[:5]) == sorted(seen[5:]) == list(range(5))


def straight(n: int, window: int, steps: int, seed: int = 0) -> list[list[int]]:
    stream = make_stream(n, seed=seed, batch_size=window)
    return [ids(stream, 1)[0] for _ in range(steps)]


@pytest.mark.parametrize(
    ("ranks", "batch_size", "count"),
    [(1, 1, 8), (1, 4, 2), (2, 4, 1), (2, 2, 2), (4, 2, 1), (4, 1, 2), (8, 1, 1)],
)
def test_global_batches_do_not_depend_on_the_split(ranks: int, batch_size: int, count: int) -> None:
    streams = [make_stream(37, batch_size=batch_size, data_rank=r, data_size=ranks) for r in range(ranks)]
    assert [global_step(streams, count) for _ in range(20)] == straight(37, 8, 20)


def test_position_moves_from_four_ranks_to_two_to_one_to_four() -> None:
    plan = [
        (4, 1, 2),
        (2, 2, 2),
        (1, 4, 2),
        (4, 2, 1),
    ]  # ranks, batch size, micro-batches; 8 samples an update
    state: dict[str, Any] | None = None
    seen = []
    for ranks, batch_size, count in plan:
        streams = [
            make_stream(30, batch_size=batch_size, data_rank=r, data_size=ranks, global_batch=8)
            for r in range(ranks)
        ]
        for stream in streams:
            if state is not None:
                stream.load_state_dict(state)
        seen += [global_step(streams, count) for _ in range(5)]
        states = [stream.state_dict() for stream in streams]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert seen == straight(30, 8, 20)
    assert state is not None
    assert state["position"] == 160


def test_what_remains_after_a_restart_on_fewer_ranks_is_what_was_not_used() -> None:
    two = [make_stream(32, batch_size=2, data_rank=r, data_size=2) for r in range(2)]
    used = global_step(two, 1) + global_step(two, 1)
    one = make_stream(32, batch_size=2)
    one.load_state_dict(two[0].state_dict())
    rest = [i for _ in range(12) for i in ids(one, 1)[0]]
    assert sorted(used + rest) == list(range(32))


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("saved_after", [9, 12])
def test_restart_at_the_end_of_an_epoch_and_inside_one(saved_after: int, prefetch: bool) -> None:
    unbroken = [b for s in [make_stream(24, batch_size=2)] for _ in range(36) for b in ids(s, 1)]
    stream = make_stream(24, batch_size=2, prefetch=prefetch)
    head = [ids(stream, 1)[0] for _ in range(saved_after)]
    state = stream.state_dict()
    stream.close()
    again = make_stream(24, batch_size=2, prefetch=prefetch)
    again.load_state_dict(state)
    assert again.state_dict() == state
    tail = [ids(again, 1)[0] for _ in range(36 - saved_after)]
    again.close()
    assert head + tail == unbroken
    for epoch in range(3):
        samples = [i for batch in unbroken[epoch * 12 : epoch * 12 + 12] for i in batch]
        assert sorted(samples) == list(range(24))


def test_reading_ahead_changes_nothing_and_does_not_count() -> None:
    plain, ahead = make_stream(40, batch_size=2), make_stream(40, batch_size=2, prefetch=True)
    for count in (1, 1, 3, 2, 1, 1, 5):  # a changed count throws away what was read
        assert ids(ahead, count) == ids(plain, count)
        assert ahead.position == plain.position
    state = ahead.state_dict()
    expected = ids(plain, 1)
    ids(ahead, 1)
    ahead.load_state_dict(state)
    assert ids(ahead, 1) == expected
    ahead.close()
    assert sorted(ahead.sources[0].reads) != []  # type: ignore[attr-defined]


def test_error_while_reading_ahead_reaches_the_step_that_needs_it() -> None:
    class Broken(BatchedNumbers):
        def batch(self, indices: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
            if len(self.reads) >= 2:
                raise OSError("disk gone")
            return super().batch(indices)

        def __getitem__(self, index: int) -> Mapping[str, Any]:
            raise OSError("disk gone")

    stream = make_stream(8, batch_size=2, source=Broken(8), prefetch=True)
    stream.take(1)
    with pytest.raises(DataError, match=r"source data: cannot read sample \d: .*disk gone"):
        stream.take(1)
    assert stream.position == 2
    stream.close()


def test_samples_one_by_one_equal_samples_by_the_batch() -> None:
    slow = make_stream(11, batch_size=3, source=Numbers(11))
    fast = make_stream(11, batch_size=3)
    for _ in range(8):
        for one, other in zip(slow.take(2), fast.take(2), strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)


def test_several_sources_keep_the_order_and_say_which() -> None:
    sources = [BatchedNumbers(50), Numbers(50, first=1000)]
    stream = SampleStream(sources, TwoSources(), batch_size=3)
    (batch,) = stream.take(1)
    assert batch["tokens"][:, 0].tolist() == [0, 1000, 1]
    assert batch["sources"].tolist() == [0, 1, 0]
    assert batch["sources"].dtype == torch.int64


def test_samples_that_do_not_fit_together_are_refused() -> None:
    class Ragged(Numbers):
        def __getitem__(self, index: int) -> Mapping[str, Any]:
            return {"tokens": np.zeros(index + 1)}

    class Keys(Numbers):
        def __getitem__(self, index: int) -> Mapping[str, Any]:
            return {"tokens" if index else "other": np.zeros(1)}

    zeros = np.zeros(2, dtype=np.int64)
    for source, reason in ((Ragged(3), r"different shapes.*\(1,\), \(2,\)"), (Keys(3), "sample 1 has")):
        with pytest.raises(DataError, match=reason):
            read_rows([source], zeros, np.arange(2))


@pytest.mark.parametrize("arguments", [{"batch_size": 4}, {"batch_size": 1, "global_batch": 4}])
def test_fewer_samples_than_a_batch(arguments: dict[str, int]) -> None:
    with pytest.raises(DataError, match=r"3 samples.*batch of 4"):
        make_stream(3, **arguments)
    stream = make_stream(3, batch_size=1)
    with pytest.raises(DataError, match=r"3 samples.*batch of 4"):
        stream.take(4)
    assert len(ids(stream, 3)) == 3


def test_changed_seed_or_data_is_refused_by_name() -> None:
    stream = make_stream(20, seed=1, batch_size=2, global_batch=2)
    stream.take(3)
    state = stream.state_dict()
    assert state == {
        "version": 2,
        "position": 6,
        "update": 3,
        "seed": 1,
        "global_batch": 2,
        "sources": {"data": {"samples": 20, "fingerprint": "numbers/20", "drawn": 6}},
        "start": {"position": 0, "update": 0, "drawn": {}, "lanes": {}},
    }
    for other, reason in (
        (make_stream(20, seed=2, batch_size=2, global_batch=2), "seed was 1, is 2$"),
        (
            make_stream(21, seed=1, batch_size=2, global_batch=2),
            "source data: samples was 20, is 21; source data: fingerprint was numbers/20, is numbers/21$",
        ),
        (
            make_stream(20, seed=1, batch_size=2, global_batch=2, source=Numbers(20, label="texts")),
            "source data: fingerprint was numbers/20, is texts/20$",
        ),
        (
            make_stream(20, seed=1, batch_size=2, global_batch=4),
            "the global batch was 2 samples, is 4$",
        ),
    ):
        with pytest.raises(DataError) as caught:
            other.load_state_dict(state)
        assert caught.match(f"(?m){reason}")
        assert other.position == 0
    allowed = make_stream(21, seed=2, batch_size=2, allow_changed=True)
    allowed.load_state_dict(state)
    assert allowed.position == 6


@pytest.mark.parametrize(
    "state", [{}, {"version": 3, "position": 0}, {"version": 2, "position": -1}, {"version": 2}]
)
def test_what_is_no_position_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="no data position"):
        make_stream(20, batch_size=2).load_state_dict(state)


def test_token_ids_beyond_the_vocabulary() -> None:
    with pytest.raises(DataError, match=r"token id \d+ does not fit model.vocab_size = 10"):
        make_stream(20, batch_size=20, vocab_size=10).take(1)
    negative = make_stream(20, batch_size=20, vocab_size=30, source=Numbers(20, first=-1))
    with pytest.raises(DataError, match="token id -1 does not fit"):
        negative.take(1)
    make_stream(20, batch_size=20, vocab_size=20).take(1)
    row = np.arange(20, dtype=np.uint16)
    with pytest.raises(DataError, match=r"token id 19 does not fit model\.vocab_size = 19"):
        make_stream(1, batch_size=1, vocab_size=19, source=PackedTokens(row, end=0, seq_len=16))


def test_step_of_tiny_micro_batches_is_cheap() -> None:
    rng = np.random.default_rng(0)
    source = PackedTokens(rng.integers(0, 64, 36_000).astype(np.uint16), end=0, seq_len=8)
    stream = make_stream(len(source), batch_size=8, source=source, vocab_size=64)
    took = []
    for _ in range(200):
        began = time.perf_counter()
        stream.take(2)
        took.append(time.perf_counter() - began)
    assert (
        statistics.quantiles(took, n=10)[0] < 1e-3
    )  # about 0.07 ms; a loop over rows or tokens takes longer
