"""Stages beside other ways to use ranks: data, tensor and context ranks inside each stage."""

from __future__ import annotations

from typing import Any

import pytest
from ppkit import BASE, alone, differences, merged, on_data_ranks, on_ranks

import forge_pp.plugin
from forge_core.loss.attached import divided
from forge_core.testing import WorkerPool, isolated_plugins, tiny_config, tiny_session

TOLERANCE = 1e-10
DISTRIBUTED = {"distributed": {"dp_shard": 1, "tp": 1}}


def compare(pool: WorkerPool, tables: dict[str, Any], function: Any = on_data_ranks) -> dict[str, float]:
    whole = merged({k: v for k, v in tables.items() if k != "distributed"})
    return differences(alone(whole), pool.run(function, tables))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
@pytest.mark.parametrize("replicas", [False, True])
def test_sharded_stages(schedule: str, replicas: bool, pool4: WorkerPool) -> None:
    layout = {"dp_replicate": 2, "dp_shard": 1} if replicas else {"dp_shard": 2}
    tables = merged(BASE, {"pp": {"size": 2, "schedule": schedule}, "distributed": layout})
    tables["train"] = {**tables["train"], "grad_accum_steps": 8}
    found = compare(pool4, tables)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize(
    ("schedule", "data"),
    [("gpipe", ""), ("interleaved_zero_bubble", ""), ("1f1b", "packed_masked_unsupervised")],
)
def test_tensor_ranks_in_stages(schedule: str, data: str, pool4: WorkerPool) -> None:
    tables = merged(BASE, {"pp": {"size": 2, "schedule": schedule}, "distributed": {"tp": 2}})
    if data:
        tables[f"data_{data}"] = {}
    found = compare(pool4, tables)
    assert max(found.values()) < TOLERANCE, found


def still_divided() -> bool:
    """Whether a loss attached after a forward without gradients would count as a part of a sum."""
    plugins = isolated_plugins({"pp": forge_pp.plugin})
    config = tiny_config(plugins=plugins, **merged(BASE, {"pp": {"size": 2}, "distributed": {"tp": 2}}))
    with tiny_session(config, plugins) as session:
        session.step_fn.forward_only(session, session.stream.take(1))
        return divided.now


def test_stages_that_hand_over_divided_tokens_are_done_with_them(pool4: WorkerPool) -> None:
    assert pool4.run(still_divided) == [False] * 4


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_four_ranks(schedule: str, pool4: WorkerPool) -> None:
    tables = merged(
        BASE, {"pp": {"size": 4, "schedule": schedule}, "model": {"n_layers": 8, "tie_embeddings": True}}
    )
    found = compare(pool4, tables, on_ranks)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_context_ranks_in_stages(schedule: str, pool4: WorkerPool) -> None:
    tables = merged(BASE, {"pp": {"size": 2, "schedule": schedule}, "distributed": {"cp": 2, "dp_shard": 1}})
    found = compare(pool4, tables, on_ranks)
    assert max(found.values()) < TOLERANCE, found


def test_tied_embeddings_over_tensor_ranks(pool4: WorkerPool) -> None:
    tables = merged(
        BASE, {"model": {"tie_embeddings": True}, "pp": {"size": 2}, "distributed": {"tp": 2, "dp_shard": 1}}
    )
    found = compare(pool4, tables, on_ranks)
    assert max(found.values()) < TOLERANCE, found


def test_tied_embeddings_that_are_sharded(pool4: WorkerPool) -> None:
    tables = merged(
        BASE, {"model": {"tie_embeddings": True}, "pp": {"size": 2}, "distributed": {"dp_shard": 2}}
    )
    tables["train"] = {**tables["train"], "grad_accum_steps": 8}
    found = compare(pool4, tables)
    assert max(found.values()) < TOLERANCE, found
