"""A run that dies and goes on ends with the bits of one that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ckptkit import assert_same_run, killed, run

MATRIX: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw, not fused": {"optimizer": {"adamw": {"fused": False}}},
    "muon": {"optimizer": {"name": "muon"}},
    "lion": {"optimizer": {"name": "lion", "lr": 1e-3}},
    "schedule-free": {"optimizer": {"name": "schedule_free_adamw"}, "scheduler": {"name": "constant"}},
    "cosine": {"scheduler": {"name": "cosine", "warmup_steps": 2}},
    "wsd": {"scheduler": {"name": "wsd", "warmup_steps": 2}},
    "freeze stage": {
        "freeze": {"modules": ["embedding"], "stages": [{"start_step": 4, "modules": ["blocks"]}]}
    },
    "spike guard": {"guard": {"spike_sigma": 1.0, "spike_window": 8}},
    "accumulation": {"train": {"grad_accum_steps": 2, "max_steps": 6}},
    "evaluation in between": {"eval": {"interval": 2, "steps": 2}},
    "async": {"checkpoint": {"mode": "async"}},
    "schedule-free, async": {
        "optimizer": {"name": "schedule_free_adamw"},
        "scheduler": {"name": "constant"},
        "checkpoint": {"mode": "async"},
        "eval": {"interval": 3},
    },
}


@pytest.mark.parametrize("case", MATRIX)
def test_killed_and_resumed_equals_straight(case: str, tmp_path: Path) -> None:
    tables = MATRIX[case]
    straight = run(tmp_path / "straight", **tables)
    killed(tmp_path / "b", 4, **tables)
    resumed = run(tmp_path / "b", **tables)
    assert_same_run(straight, resumed)
    assert straight.losses[-len(resumed.losses) :] == resumed.losses
    assert 0 < len(resumed.losses) < len(straight.losses)
    keep = ("step", "train/loss", "train/lr", "eval/loss", "train/grad_norm")
    lines = [[{k: r[k] for k in keep if k in r} for r in result.records] for result in (straight, resumed)]
    assert lines[0] == lines[1]
