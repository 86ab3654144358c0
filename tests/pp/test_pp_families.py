"""Families that forge-pp has never heard of, schedules from files, and the norm by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ppkit import BASE, merged, plain
from torch import nn

from forge_core.contract import MeshAxis
from forge_core.distributed.mesh import Mesh
from forge_core.loop.clip import GlobalNorm, clip_
from forge_core.loop.inference import for_one_process
from forge_core.testing import WorkerPool, isolated_plugins, run_tiny, tiny_config
from forge_pp.schedules import SCHEDULES
from forge_pp.table import PpConfig

TOLERANCE = 1e-10
RETENTION = Path(__file__).parents[2] / "examples/forge-retention/src"


def retained(tables: dict[str, Any]) -> dict[str, Any]:
    """A run of the example with its own mixer and loss term."""
    sys.path.insert(0, str(RETENTION))
    import forge_retention.plugin

    import forge_pp.plugin

    known = {"retention": forge_retention.plugin, "pp": forge_pp.plugin}
    plugins = isolated_plugins({name: plugin for name, plugin in known.items() if name in tables})
    return plain(run_tiny(tiny_config(plugins=plugins, **tables), plugins))


_whole: list[dict[str, Any]] = []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_example_family(schedule: str, pool2: WorkerPool) -> None:
    from ppkit import differences

    tables = merged(BASE, {"retention": {"layers": "even", "smoothness": 0.1}})
    if not _whole:
        _whole.append(retained(tables))
    ranks = pool2.run(retained, merged(tables, {"pp": {"size": 2, "schedule": schedule}}))
    found = differences(_whole[0], ranks)
    assert max(found.values()) < TOLERANCE, found


def test_a_schedule_from_a_file(pool2: WorkerPool, tmp_path: Path) -> None:
    from ppkit import alone, differences, on_ranks

    path = tmp_path / "mine.csv"
    # one rank has stages 0 and 1, the other 2 and 3; weights' gradients of the last stage come late
    path.write_text("0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n,,2F0,3F0,3I0,2B0,2F1,3F1,3I1,2B1,3W0,3W1\n")
    train = {"train": {"grad_accum_steps": 2}}
    tables = merged(BASE, train, {"pp": {"size": 2, "stages_per_rank": 2, "schedule": str(path)}})
    found = differences(alone(tables), pool2.run(on_ranks, tables))
    assert max(found.values()) < TOLERANCE, found


def norms(limit: float) -> list[float]:
    """Stage 0 has a parameter with gradient 3, stage 1 one with gradient 4: the norm and this rank's clipped
    gradient."""
    rank = torch.distributed.get_rank()
    axis = MeshAxis(name="pp", size=2, place=10, loss_differs=True, params_differ=True)
    mesh = Mesh([axis], rank=rank, world_size=2, connected=True)
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0 + rank]])
    norm, _ = GlobalNorm(model, mesh, world_size=2)([model.weight])
    clip_([model.weight.grad], norm, limit)
    return [float(norm), float(model.weight.grad)]


def test_one_norm_over_stages(pool2: WorkerPool) -> None:
    first, second = pool2.run(norms, 1.0)
    assert first[0] == second[0] == 5.0  # the root of 3 * 3 + 4 * 4
    assert [first[1], second[1]] == pytest.approx([0.6, 0.8], rel=1e-5)
    assert pool2.run(norms, 10.0) == [[5.0, 3.0], [5.0, 4.0]]


def test_a_run_of_many_ranks_is_used_on_one() -> None:
    import forge_pp.plugin

    tables = merged(BASE, {"pp": {"size": 2}})
    config = tiny_config(plugins=isolated_plugins({"pp": forge_pp.plugin}), world_size=2, **tables)
    assert for_one_process(config)[PpConfig].size == 1
