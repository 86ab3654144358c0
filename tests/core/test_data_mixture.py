"""Mixtures: shares as asked for, a cursor a source, any position at once."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from datakit import ids, mixed_stream, mixture

from forge_core.data.mixture import shares_of
from forge_core.data.order import ShuffledOrder, Start
from forge_core.data.rotation import CIRCLE, Rotation, arcs, floor_sum
from forge_core.errors import DataError


def test_sum_of_floors_equals_adding_them_up() -> None:
    rng = np.random.default_rng(0)
    for n, m, a, b in rng.integers(0, 60, (300, 4)).tolist():
        assert floor_sum(n, m + 1, a, b) == sum((a * i + b) // (m + 1) for i in range(n))


@pytest.mark.parametrize("weights", [[1.0], [3.0, 1.0], [1.0, 0.0, 5.0], [1e-12, 1.0], [0.2] * 5])
def test_draws_of_each_source_are_counted_without_looking_at_them(weights: list[float]) -> None:
    rotation = Rotation(arcs(weights), 123456789)
    which = rotation.sources(0, 3000)
    for n in (0, 1, 2, 17, 999, 3000):
        assert rotation.drawn(n) == tuple(np.bincount(which[:n], minlength=len(weights)).tolist())
    assert np.array_equal(rotation.sources(1234, 50), which[1234:1284])
    far = rotation.drawn(10**15 + 1000)
    near = rotation.drawn(10**15)
    found = np.bincount(rotation.sources(10**15, 1000), minlength=len(weights)).tolist()
    assert [a - b for a, b in zip(far, near, strict=True)] == found


def test_arcs_fill_the_circle_and_no_share_vanishes() -> None:
    assert sum(arcs([1e-30, 3.0, 1.0])) == CIRCLE
    assert arcs([1e-30, 1.0, 0.0])[0] == 1
    assert arcs([1e-30, 1.0, 0.0])[2] == 0


def test_share_of_three_to_one_over_four_thousand_draws() -> None:
    for seed in range(20):
        order = mixture({"a": 3, "b": 1}, {"a": 60, "b": 60}, seed=seed)
        which, _ = order.at(0, 4000)
        assert abs((which == 0).mean() - 0.75) < 0.002  # an even rotation is off by a few draws of 4000
        # what one of four ranks sees is mixed alike
        assert abs((which[1::4] == 0).mean() - 0.75) < 0.03


def test_restart_after_thirteen_of_forty_draws_changes_nothing() -> None:
    def stream() -> object:
        return mixed_stream(mixture({"a": 3, "b": 1}, {"a": 60, "b": 60}, seed=3), batch_size=1)

    whole = stream()
    straight = [ids(whole, 1)[0][0] for _ in range(40)]  # type: ignore[arg-type]
    first = stream()
    head = [ids(first, 1)[0][0] for _ in range(13)]  # type: ignore[arg-type]
    again = stream()
    again.load_state_dict(first.state_dict())  # type: ignore[attr-defined]
    assert head + [ids(again, 1)[0][0] for _ in range(27)] == straight  # type: ignore[arg-type]


@pytest.mark.parametrize("names", list(itertools.permutations("ab")))
def test_each_sample_once_with_equal_weights(names: tuple[str, ...]) -> None:
    """A of two samples, B of one: after three draws there is nothing left, in any order of the sources."""
    sizes = {"a": 2, "b": 1}
    order = mixture({"a": 1, "b": 1}, {n: sizes[n] for n in names}, epochs={"a": 1, "b": 1})
    assert order.end == 3
    which, indices = order.at(0, 3)
    assert {(names[s], i) for s, i in zip(which.tolist(), indices.tolist(), strict=True)} == {
        ("a", 0),
        ("a", 1),
        ("b", 0),
    }
    with pytest.raises(DataError, match="the data ends after 3 samples"):
        order.at(1, 3)


def test_used_up_source_leaves_its_place_to_the_others() -> None:
    order = mixture({"a": 1, "b": 1, "c": 2}, {"a": 5, "b": 7, "c": 1000}, epochs={"a": 2, "b": 1})
    which, indices = order.at(0, 2000)
    a, b = np.flatnonzero(which == 0), np.flatnonzero(which == 1)
    assert len(a) == 10
    assert len(b) == 7
    assert sorted(indices[a[:5]].tolist()) == sorted(indices[a[5:]].tolist()) == list(range(5))
    assert (which[max(a[-1], b[-1]) + 1 :] == 2).all()
    assert order.end is None
    between = which[b[-1] + 1 : a[-1]]  # a and c alone: shares 1 to 2
    assert set(between.tolist()) <= {0, 2}
    for position in (0, 1, 13, 500, 2000):
        assert list(order.drawn(position).values()) == np.bincount(which[:position], minlength=3).tolist()


def test_every_source_goes_through_its_epochs_each_in_an_order_of_its_own() -> None:
    order = mixture({"a": 2, "b": 1}, {"a": 11, "b": 7}, seed=5)
    which, indices = order.at(0, 3000)
    for number, n in ((0, 11), (1, 7)):
        mine = indices[which == number]
        epochs = [mine[k : k + n].tolist() for k in range(0, len(mine) - n, n)]
        assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
        assert all(one != other for one, other in itertools.pairwise(epochs))


def test_place_of_a_source_in_the_list_does_not_matter_to_its_order() -> None:
    one = mixture({"a": 1, "b": 1}, {"a": 50, "b": 30})
    other = mixture({"a": 1, "b": 1}, {"b": 30, "a": 50})
    (w1, i1), (w2, i2) = one.at(0, 60), other.at(0, 60)
    assert i1[w1 == 0][:20].tolist() == i2[w2 == 1][:20].tolist()
    alone = ShuffledOrder(50, 0, "a").at(0, 20)[1]
    assert i1[w1 == 0][:20].tolist() == alone.tolist()


def test_any_stretch_equals_the_same_stretch_of_a_long_reading() -> None:
    order = mixture(
        {"a": 5, "b": 1, "c": 0},
        {"a": 300, "b": 41, "c": 9},
        phases=[(1000, {"c": 1, "a": 1}), (5000, {"b": 1})],
        epochs={"c": 3},
    )
    which, indices = order.at(0, 12000)
    rng = np.random.default_rng(1)
    for position, count in zip(rng.integers(0, 11000, 40), rng.integers(1, 900, 40), strict=True):
        w, i = order.at(int(position), int(count))
        assert np.array_equal(w, which[position : position + count])
        assert np.array_equal(i, indices[position : position + count])


def test_changed_weights_repeat_and_drop_nothing() -> None:
    """Until a source is through, none of its samples comes twice, whatever its weights were."""
    sizes: dict[str, int | None] = {"a": 400, "b": 400}
    stream = mixed_stream(mixture({"a": 3, "b": 1}, sizes), batch_size=8, global_batch=8)
    seen = [i for _ in range(10) for i in ids(stream, 1)[0]]
    other = mixed_stream(mixture({"a": 1, "b": 5}, sizes), batch_size=8, global_batch=8)
    other.load_state_dict(stream.state_dict())
    seen += [i for _ in range(10) for i in ids(other, 1)[0]]
    third = mixed_stream(mixture({"a": 1, "b": 1}, sizes), batch_size=8, global_batch=8)
    third.load_state_dict(other.state_dict())
    state = third.state_dict()
    assert state["start"]["position"] == 160
    assert state["position"] == 160
    seen += [i for _ in range(40) for i in ids(third, 1)[0]]
    assert len(seen) == 480
    assert len(set(seen)) == 480
    a, b = ShuffledOrder(400, 0, "a").at(0, 400)[1], 1000 + ShuffledOrder(400, 0, "b").at(0, 400)[1]
    mine, others = [i for i in seen if i < 1000], [i for i in seen if i >= 1000]
    assert mine == a[: len(mine)].tolist()
    assert others == b[: len(others)].tolist()
    # and a run saved under changed weights goes on as if it had not been interrupted
    resumed = mixed_stream(mixture({"a": 1, "b": 1}, sizes), batch_size=8, global_batch=8)
    resumed.load_state_dict(state)
    assert [i for _ in range(40) for i in ids(resumed, 1)[0]] == seen[160:]


def test_source_that_is_added_starts_and_one_that_is_gone_is_forgotten() -> None:
    stream = mixed_stream(mixture({"a": 1, "b": 1}, {"a": 50, "b": 50}), batch_size=10, global_batch=10)
    before = [i for _ in range(3) for i in ids(stream, 1)[0] if i < 1000]
    other = mixed_stream(mixture({"a": 1, "c": 1}, {"a": 50, "c": 50}), batch_size=10, global_batch=10)
    other.load_state_dict(stream.state_dict())
    after = [i for _ in range(3) for i in ids(other, 1)[0]]
    assert other.state_dict()["sources"]["c"]["drawn"] == sum(i >= 1000 for i in after)
    a = ShuffledOrder(50, 0, "a").at(0, 50)[1].tolist()
    mine = before + [i for i in after if i < 1000]
    assert mine == a[: len(mine)]
    strange = mixed_stream(mixture({"x": 1}, {"x": 50}), batch_size=10, global_batch=10)
    with pytest.raises(DataError, match="the sources were a, b, are x"):
        strange.load_state_dict(stream.state_dict())


def test_a_billion_samples_take_no_memory_and_no_time() -> None:
    tracemalloc.start()
    began = time.perf_counter()
    sizes = {"a": 10**9, "b": 10**9, "c": 77}
    order = mixture({"a": 5, "b": 2, "c": 1}, sizes, phases=[(10**8, {"a": 1, "b": 1})])
    resumed = order.rebased(Start(position=10**9, update=10**9, drawn={"a": 6 * 10**8}))
    which, indices = resumed.at(10**9, 64)
    took = time.perf_counter() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(indices) == 64
    assert set(which.tolist()) == {0, 1}
    assert took < 1.0
    assert peak < 10e6


def test_shares_by_tokens_samples_and_temperature() -> None:
    assert shares_of([3, 1], [1, 1]) == (0.75, 0.25)
    # samples of the first are twice as long: for half of the tokens it takes a third of the draws
    assert shares_of([1, 1], [200, 100]) == pytest.approx((1 / 3, 2 / 3))
    # 16 : 1 becomes 4 : 1 at temperature 2, and equal as it grows
    assert shares_of([16, 1], [1, 1], temperature=2) == pytest.approx((0.8, 0.2))
    assert shares_of([16, 0, 1], [1, 1, 1], temperature=1e9) == pytest.approx((0.5, 0, 0.5))


class Plain:
    """Ten samples of three tokens; `more` are further keys, `blanks` what others get of them."""

    def __init__(self, more: dict[str, Any], blanks: dict[str, Any]) -> None:
        self.more, self.blanks = more, blanks

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": np.full(3, index), **self.more}


def test_samples_that_lack_a_key_get_the_blank_of_the_source_that_has_it() -> None:
    from forge_core.data.collate import read_rows

    mark = np.array([7, 7])
    sources: Any = (Plain({"mark": mark}, {"mark": np.array([-1, -1])}), Plain({}, {}))
    rows = read_rows(sources, np.array([0, 1, 1]), np.array([4, 5, 6]))
    assert rows["mark"].tolist() == [[7, 7], [-1, -1], [-1, -1]]
    # also where this rank happens to read nothing else
    alone = read_rows(sources, np.array([1]), np.array([2]))
    assert alone["mark"].tolist() == [[-1, -1]]
