"""Phases: from their first update on, not before and not after, wherever a run was interrupted."""

from __future__ import annotations

from typing import Any

import pytest
from datakit import global_step, ids, mixed_stream, mixture

from forge_core.data.mixture import phase_shares
from forge_core.data.order import ShuffledOrder
from forge_core.errors import ConfigError
from forge_core.testing import run_tiny, tiny_config

SIZES: dict[str, int | None] = {"a": 100, "b": 100}


def two_phases(**arguments: Any) -> Any:
    """Source a (numbers below 1000) for updates 1 to 4, source b (from 1000 on) from update 5; batch 2."""
    order = mixture({"a": 1}, SIZES, phases=[(5, {"b": 1})], global_batch=2)
    return mixed_stream(order, batch_size=2, global_batch=2, **arguments)


@pytest.mark.parametrize("saved_after", [3, 4, 5, 6])
def test_restart_before_at_and_after_a_change_of_phase(saved_after: int) -> None:
    whole = two_phases()
    straight = [ids(whole, 1)[0] for _ in range(10)]
    assert all(i < 1000 for batch in straight[:4] for i in batch)
    assert all(i >= 1000 for batch in straight[4:] for i in batch)
    first = two_phases()
    head = [ids(first, 1)[0] for _ in range(saved_after)]
    again = two_phases()
    again.load_state_dict(first.state_dict())
    assert head + [ids(again, 1)[0] for _ in range(10 - saved_after)] == straight


def test_cursors_are_carried_through_phases() -> None:
    """a, then b, then both: nothing comes twice before a source is through."""
    phases = [(5, {"b": 1.0}), (9, {"a": 1.0, "b": 1.0})]
    stream = mixed_stream(
        mixture({"a": 1}, SIZES, phases=phases, global_batch=4), batch_size=4, global_batch=4
    )
    seen = [i for _ in range(40) for i in ids(stream, 1)[0]]
    a, b = [i for i in seen if i < 1000], [i for i in seen if i >= 1000]
    assert a == ShuffledOrder(100, 0, "a").at(0, len(a))[1].tolist()
    assert b == (1000 + ShuffledOrder(100, 0, "b").at(0, len(b))[1]).tolist()
    assert seen[:16] == a[:16]
    assert seen[16:32] == b[:16]


def test_phases_keep_to_updates_after_the_global_batch_was_changed() -> None:
    order = mixture({"a": 1}, SIZES, phases=[(5, {"b": 1})], global_batch=2)
    stream = mixed_stream(order, batch_size=2, global_batch=2)
    for _ in range(2):
        stream.take(1)
    other_order = mixture({"a": 1}, SIZES, phases=[(5, {"b": 1})], global_batch=6)
    other = mixed_stream(other_order, batch_size=6, global_batch=6, allow_changed=True)
    other.load_state_dict(stream.state_dict())
    later = [ids(other, 1)[0] for _ in range(4)]  # updates 3 to 6
    assert [max(batch) >= 1000 for batch in later] == [False, False, True, True]
    assert [min(batch) >= 1000 for batch in later] == [False, False, True, True]
    assert other.state_dict()["update"] == 6


def test_phase_without_weights_keeps_those_before() -> None:
    found = phase_shares("ab", [3, 1], [(5, {}), (9, {"b": 2.0})], [1.0, 1.0], 1.0)
    assert found == [(1, (0.75, 0.25)), (9, (0.0, 1.0))]
    assert phase_shares("ab", [3, 1], [(1, {"b": 2.0})], [1.0, 1.0], 1.0) == [(1, (0.0, 1.0))]


def test_split_over_ranks_does_not_move_a_phase() -> None:
    straight = mixed_stream(
        mixture({"a": 1}, SIZES, phases=[(3, {"b": 1})], global_batch=8), batch_size=8, global_batch=8
    )
    expected = [ids(straight, 1)[0] for _ in range(5)]
    ranks = [
        mixed_stream(
            mixture({"a": 1}, SIZES, phases=[(3, {"b": 1})], global_batch=8),
            batch_size=2,
            data_rank=r,
            data_size=2,
            global_batch=8,
        )
        for r in range(2)
    ]
    assert [global_step(ranks, 2) for _ in range(5)] == expected


MIX = [
    {"name": "a", "source": "synthetic", "weight": 3.0, "synthetic": {"n_samples": 500, "vocab_size": 3}},
    {"name": "b", "source": "synthetic", "weight": 1.0, "synthetic": {"n_samples": 500}},
]


def test_learning_rate_and_weights_change_with_the_same_update() -> None:
    data = {"mix": MIX, "phases": [{"start_step": 4, "weights": {"b": 1.0}, "lr_scale": 0.1}]}
    config = tiny_config(
        "--train.max_steps=6",
        "--metrics.log_interval=1",
        "--scheduler.name=none",
        "--optimizer.lr=0.01",
        "--data.holdout=0.1",
        data=data,
    )
    run = run_tiny(config)
    assert run.metric("train/lr") == pytest.approx([0.01] * 3 + [0.001] * 3)
    tokens = run.metric("data/a/tokens")
    assert tokens[0] < tokens[1] < tokens[2]
    assert tokens[2:] == [tokens[2]] * 4


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"mix": [{**MIX[0], "weight": 0.0}]}, "all weights are 0"),
        ({"mix": MIX, "phases": [{"start_step": 2, "weights": {"a": 0.0}}]}, "all weights are 0"),
        (
            {"mix": MIX, "phases": [{"start_step": 2, "weights": {"c": 1.0}}]},
            "no source of the mixture is called",
        ),
        ({"phases": [{"start_step": 2, "weights": {"c": 1.0}}]}, "there is no mixture to weigh"),
        ({"mix": [MIX[0], MIX[0]]}, "two sources are called 'a'"),
        ({"mix": [MIX[0], {"name": "c"}]}, "is left out, while other sources have one"),
        ({"mix": MIX, "phases": [{"start_step": 3}, {"start_step": 3}]}, "3 does not come after 3"),
        ({"mix": MIX, "phases": [{"start_step": 0}]}, "must be >= 1"),
        ({"mix": MIX, "path": "x"}, "data.path: a mixture names its own sources"),
    ],
)
def test_mixtures_that_make_no_sense_are_told_with_the_reason(data: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_config(data=data)
    assert reason in str(caught.value)


def test_explain_counts_what_each_source_will_give() -> None:
    from forge_core.loop.explain import explain
    from forge_core.testing import isolated_plugins

    config = tiny_config(
        data={"mix": MIX, "phases": [{"start_step": 6, "weights": {"b": 1.0}}]},
        train={"batch_size": 8, "max_steps": 10},
    )
    found = explain(config, isolated_plugins())["data"]
    # five updates of 8 samples at 3 to 1 (even up to a draw), then five of b alone
    a, b = found["sources"]
    assert (a["name"], a["samples"], a["drawn"]) == ("a", 500, pytest.approx(30, abs=1))
    assert a["drawn"] + b["drawn"] == 80
    assert b["epochs"] == b["drawn"] / 500
    assert f"a {a['drawn']} draws ({a['epochs']:.3g} epochs), b {b['drawn']} draws" in found["summary"]
