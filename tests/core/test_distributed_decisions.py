"""What all ranks must decide alike: when to stop, whether an update is good, what is about to run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributedkit import (
    bad_steps,
    differing,
    differing_model,
    evaluated,
    sampled,
    stops,
    stops_in_evaluation,
    train,
)

from forge_core.contract import MeshAxis
from forge_core.distributed.control import Control
from forge_core.distributed.mesh import Mesh
from forge_core.loop.log import same_names
from forge_core.loop.signals import StopSignal
from forge_core.metrics.collector import MetricCollector
from forge_core.testing import WorkerPool


def test_a_signal_to_one_rank_stops_all_after_the_same_update(pool2: WorkerPool) -> None:
    first, second = pool2.run(stops, 9)
    # it comes while update 3 runs, after the reduction of that step: all know of it in update 4
    assert first[:2] == second[:2] == [128 + signal.SIGTERM, 4]
    assert first[2] == second[2]
    assert [first[3], second[3]] == [None, signal.SIGTERM]
    # what would be saved is the state after update 4, as of a run of four that nobody disturbs
    straight = pool2.run(stops, 4, "nothing")[0]
    assert straight[:2] == [0, 4]
    for name, weight in straight[4].items():
        assert torch.equal(first[4][name], weight), name
        assert torch.equal(second[4][name], weight), name


def test_a_signal_in_the_last_update_lets_the_run_end(pool2: WorkerPool) -> None:
    first, second = pool2.run(stops, 3)
    assert first[:2] == second[:2] == [0, 3]


def test_a_signal_during_an_evaluation_ends_it_on_all_ranks(pool2: WorkerPool) -> None:
    for status, step, batches, finished, seconds in pool2.run(stops_in_evaluation):
        assert (status, step) == (128 + signal.SIGTERM, 1)
        assert batches == 3  # of 100
        assert not finished
        assert seconds < 5


@pytest.mark.parametrize("steps", [0, 3])
def test_an_evaluation_counts_each_sample_once(pool2: WorkerPool, steps: int) -> None:
    """The whole set, of a size that two ranks cannot share evenly, and a part of it."""
    alone = evaluated({}, 4, steps)
    for layout in ({"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}, {"tp": 2}, {"cp": 2}):
        for loss in pool2.run(evaluated, layout, 4, steps):
            assert loss == pytest.approx(alone, rel=1e-7)


def test_a_loss_that_is_infinite_on_one_rank_is_bad_on_all(pool2: WorkerPool, tmp_path: Path) -> None:
    skipping = pool2.run(bad_steps, "skip", 9, str(tmp_path / "skip"))
    stopping = pool2.run(bad_steps, "stop", 9, str(tmp_path / "stop"))
    assert [kind for kind, _ in [*skipping, *stopping]] == ["GuardError"] * 4
    assert skipping[0] == skipping[1]
    assert "2 bad steps in a row, the last at step 4" in skipping[0][1]
    assert "step 3 is bad (loss inf" in stopping[0][1]
    assert stopping[0] == stopping[1]
    incident = tmp_path / "skip" / "bad" / "incidents" / "step_00000003"
    assert sorted(path.name for path in incident.iterdir()) == [
        "batch.npz",
        "batch_rank_1.npz",
        "summary.json",
    ]
    summary = json.loads((incident / "summary.json").read_text())
    weights = train(
        {}, 4, 1, "fp32", 2, scheduler={"name": "constant"}
    ).weights  # those of one process before the bad step
    assert summary["parameters"].keys() == weights.keys()
    for name, weight in weights.items():
        assert summary["parameters"][name]["norm"] == pytest.approx(float(weight.norm()), rel=1e-5)
        assert summary["parameters"][name]["non_finite"] == 0


def test_ranks_of_different_configurations_are_refused(pool2: WorkerPool) -> None:
    first, second = pool2.run(differing, {"train.seed": "7", "optimizer.lr": "0.5"})
    assert first == second
    assert "train.seed is 1 on rank 0, 7 on rank 1" in first
    assert "optimizer.lr is 0.01 on rank 0, 0.5 on rank 1" in first


def test_ranks_of_different_versions_are_refused(pool2: WorkerPool) -> None:
    first, second = pool2.run(differing, {}, True)
    assert first == second
    assert "forge is" in first
    assert "1.2.3 on rank 1" in first


def test_ranks_that_have_built_different_models_are_refused(pool2: WorkerPool) -> None:
    first, second = pool2.run(differing_model)
    assert first == second
    assert "parameter more is missing on rank 0, (3,) on rank 1" in first
    assert "of the plan is" in first


def test_all_ranks_write_one_sample_however_the_model_is_divided(pool2: WorkerPool) -> None:
    texts = [pool2.run(sampled, layout) for layout in ({"dp_shard": 2}, {"tp": 2}, {"cp": 2})]
    alone = sampled({})
    assert alone.startswith("--- sample: after 'def ' the model writes")
    assert texts == [[alone] * 2] * 3


def sums_of_stages() -> dict[str, Any]:
    """What two stages, each with a loss that the other lacks, report together."""
    place = dist.get_rank()
    axis = MeshAxis(name="stages", size=2, place=10, loss_differs=True, params_differ=True)
    mesh = Mesh([axis], rank=place, world_size=2, connected=True)
    mine = [{"all": 1.0, "first": 2.0}, {"second": (6.0, 4.0), "all": 3.0}][place]
    control = Control(mesh, StopSignal(shared=True))
    collector = MetricCollector([], group=dist.group.WORLD)
    return collector.collect(sums=same_names(mine, control))


def test_losses_that_only_one_stage_knows_are_reported(pool2: WorkerPool) -> None:
    expected = {"all": 4.0, "first": 2.0, "second": 1.5}
    assert pool2.run(sums_of_stages) == [expected, expected]
