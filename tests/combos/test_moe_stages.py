"""Experts in stages: divided over ranks of each, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest

from forge_core.testing import WorkerPool

pytestmark = pytest.mark.packages("moe", "pp")

MOE: dict[str, Any] = {"moe": {"num_experts": 4, "top_k": 2, "expert_hidden_dim": 16}}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_expert_ranks_in_stages(schedule: str, pool4: WorkerPool) -> None:
    from ppkit import BASE, alone, differences, merged, on_data_ranks

    tables = merged(
        BASE, MOE, {"moe": {"ep": 2}, "pp": {"size": 2, "schedule": schedule}, "distributed": {"dp_shard": 2}}
    )
    tables["train"] = {**tables["train"], "grad_accum_steps": 8}
    whole = alone(merged({k: v for k, v in tables.items() if k != "distributed"}, {"moe": {"ep": 1}}))
    found = differences(whole, pool4.run(on_data_ranks, tables))
    assert max(found.values()) < 1e-10, found


def test_metrics_are_those_of_one_process(pool2: WorkerPool) -> None:
    from ppkit import BASE, alone, merged, on_ranks

    mix = [
        {"name": name, "source": "synthetic", "weight": 1.0, "synthetic": {"n_samples": 64}} for name in "ab"
    ]
    layers = {"moe": {"layer_metrics": True, "bias_rate": 0.001}}
    tables = merged(BASE, MOE, layers, {"pp": {"size": 2}, "data": {"mix": mix}, "model": {"vocab_size": 64}})
    whole = alone(tables)["records"]
    ranks = pool2.run(on_ranks, tables)[0]["records"]
    measured = ("train/loss", "train/objective", "train/grad_norm", "loss/", "data/", "moe/", "eval/")
    for one, many in zip(whole, ranks, strict=True):
        names = {name for name in one if name.startswith(measured)}
        assert names == {name for name in many if name.startswith(measured)}
        for name in names:
            assert many[name] == pytest.approx(one[name], rel=1e-9, abs=1e-12), name


def test_stages_take_their_ranks_before_experts_do() -> None:
    """Of four ranks two are stages: then two share the experts, and none an expert of an odd width."""
    from ppkit import BASE, merged, plugins_of

    from forge_core.errors import ConfigError
    from forge_core.testing import tiny_config

    def config(**tables: Any) -> None:
        both = merged(BASE, {"moe": {**MOE["moe"], "ep": 2, "expert_hidden_dim": 33}}, tables)
        tiny_config(plugins=plugins_of(both), world_size=4, **both)

    config(pp={"size": 2})
    with pytest.raises(ConfigError, match="33 is not divisible by the 2 ranks that share an expert"):
        config(pp={"size": 1})
