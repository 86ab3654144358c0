"""A run that dies and goes on ends with the bits of one that never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptkit import assert_same_run, killed, run
from rankskit import go

from forge_core.testing import WorkerPool

MIXTURE = {
    "source": "synthetic",
    "mix": [
        {"name": "a", "source": "synthetic", "weight": 1.0},
        {"name": "b", "source": "synthetic", "weight": 3.0},
    ],
    "phases": [{"start_step": 4, "weights": {"a": 1.0, "b": 0.5}, "lr_scale": 0.5}],
}
FREE = {"optimizer": {"name": "schedule_free_adamw"}, "scheduler": {"name": "constant"}}
MATRIX: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW, not fused": {"optimizer": {"adamw": {"fused": False}}},
    "Muon": {"optimizer": {"name": "muon"}},
    "Lion": {"optimizer": {"name": "lion", "lr": 1e-3}},
    "schedule-free": FREE,
    "schedule-free, evaluated": {**FREE, "eval": {"interval": 3}, "checkpoint": {"mode": "async"}},
    **{
        f"schedule {name}": {"scheduler": {"name": name, "warmup_steps": 2}}
        for name in ("cosine", "linear", "wsd", "rex", "constant")
    },
    "freeze stage": {
        "freeze": {"modules": ["embedding"], "stages": [{"start_step": 4, "modules": ["blocks"]}]}
    },
    "guard with bad steps": {"guard": {"spike_sigma": 1.0, "spike_window": 8}},
    "dropout": {"model": {"dropout": 0.2}},
    "mixture with a phase": {"data": MIXTURE},
    "accumulation": {"train": {"grad_accum_steps": 2, "max_steps": 6}},
    "evaluation in between": {"eval": {"interval": 2, "steps": 2}},
    "workers 2": {"data": {"num_workers": 2}},
    "background": {"checkpoint": {"mode": "async"}},
    "recomputation of activations": {"train": {"activation_checkpointing": "full"}},
}
RESULTS: dict[str, str] = {}


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prints what was compared, once all is done."""
    yield
    width = max(map(len, RESULTS), default=0)
    lines = [f"{case:<{width}}  {result}" for case, result in RESULTS.items()]
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n" + "\n".join(["killed and resumed against straight:", *lines]))


@pytest.mark.parametrize("case", MATRIX)
def test_killed_and_resumed_equals_straight(case: str, tmp_path: Path) -> None:
    tables = MATRIX[case]
    straight = run(tmp_path / "straight", **tables)
    killed(tmp_path / "b", 4, **tables)
    resumed = run(tmp_path / "b", **tables)
    RESULTS[case] = "differs"
    assert_same_run(straight, resumed)
    assert straight.losses[-len(resumed.losses) :] == resumed.losses
    assert 0 < len(resumed.losses) < len(straight.losses)
    keep = ("step", "train/loss", "train/lr", "eval/loss", "train/grad_norm")
    lines = [[{k: r[k] for k in keep if k in r} for r in result.records] for result in (straight, resumed)]
    assert lines[0] == lines[1]
    RESULTS[case] = f"equal in every bit; {len(resumed.losses)} of {len(straight.losses)} updates after it"


def test_two_cycles_in_one_run(tmp_path: Path) -> None:
    tables: dict[str, Any] = {"train": {"max_steps": 12}, "scheduler": {"name": "linear", "warmup_steps": 4}}
    straight = run(tmp_path / "straight", **tables)
    killed(tmp_path / "b", 4, **tables)
    killed(tmp_path / "b", 8, **tables)
    resumed = run(tmp_path / "b", **tables)
    assert_same_run(straight, resumed)
    assert straight.losses[7:] == resumed.losses
    RESULTS["killed twice"] = "equal in every bit"


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lion", "schedule_free_adamw"])
@pytest.mark.parametrize("layout", ["dp_shard", "tp"])
def test_on_two_ranks(optimizer: str, layout: str, pool2: WorkerPool, tmp_path: Path) -> None:
    def start(place: str, kill: int) -> list[Any]:
        table = {"optimizer": optimizer, "mode": "async"}
        rows = 4 if layout == "dp_shard" else 8
        answer: list[Any] = pool2.run(go, str(tmp_path / place), {layout: 2}, rows, 6, kill, table)[0]
        return answer

    straight = start("straight", 0)
    start("b", 4)
    resumed = start("b", 0)
    assert resumed[0] == 3
    assert resumed[1] == straight[1][3:]
    assert all(torch.equal(weight, straight[2][name]) for name, weight in resumed[2].items())
    RESULTS[f"2 ranks, {layout}, {optimizer}"] = "equal in every bit"
