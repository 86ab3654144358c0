"""Which ranks draw the same random numbers, and which draw their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from distributedkit import TABLES, plugins_of, rank

from forge_core.contract import MeshAxis
from forge_core.distributed.mesh import Mesh
from forge_core.loop.seeds import apart, seed_process
from forge_core.testing import WorkerPool, run_tiny, tiny_config

STAGES = MeshAxis(name="stages", size=2, place=10, loss_differs=True, params_differ=True)
TENSOR = MeshAxis(name="tp", size=2, place=50)
DATA = MeshAxis(name="dp_shard", size=2, place=30, data_differs=True)
CONTEXT = MeshAxis(name="cp", size=2, place=40, loss_differs=True)


def draws(axis: MeshAxis) -> list[list[float]]:
    """First torch and NumPy numbers of the two ranks along an axis."""
    found = []
    for number in range(2):
        seed_process(5, Mesh([axis], rank=number, world_size=2))
        found.append([float(torch.rand(())), float(np.random.rand())])
    return found


def test_peers_of_one_sample_draw_alike_and_data_ranks_apart() -> None:
    for axis in (TENSOR, CONTEXT):
        first, second = draws(axis)
        assert first == second, axis.name
    first, second = draws(DATA)
    assert first[0] != second[0]
    assert first[1] != second[1]
    first, second = draws(STAGES)
    assert first[0] != second[0]
    assert first[1] == second[1]


def test_a_region_of_its_own_and_what_follows() -> None:
    """Each rank draws its own inside, a recomputed forward the same again, and afterwards all draw alike."""
    inside, after = [], []
    for number in range(2):
        torch.manual_seed(3)
        state = torch.get_rng_state()
        with apart(number):
            inside.append(torch.rand(4))
        after.append(torch.rand(4))
        torch.set_rng_state(state)
        with apart(number):
            assert torch.equal(torch.rand(4), inside[-1])
    assert not torch.equal(inside[0], inside[1])
    assert torch.equal(after[0], after[1])


def masks(layout: dict[str, Any], reads: int) -> list[Any]:
    """Zeros of the dropout after attention in the first block, at update 1, and the run's losses.

    Args:
        reads: batches that rank 0 reads before, on its own.
    """
    from forge_core.contract import Transform

    kept: list[torch.Tensor] = []

    def hook(module: Any, inputs: Any) -> None:
        if not kept:
            kept.append((inputs[0] == 0).detach().clone())

    def transforms(session: Any) -> list[Transform]:
        def apply(model: Any) -> Any:
            block = next(iter(model.layers.values()))
            block.register_forward_hook(lambda m, i, out: kept.append((out - i[0])[:, ::2].detach().clone()))
            if rank() == 0:
                for _ in range(reads):
                    next(iter(session.data.evaluation[0]))
            return model

        return [Transform(phase="adapt", name="look", apply=apply)]

    plugins = plugins_of(forge_model_transforms=transforms)
    tables = {
        **TABLES,
        "model": {"vocab_size": 40, "dropout": 0.5},
        "data": {"source": "kit/masked", "holdout": 0.1},
        "train": {"batch_size": 2, "seq_len": 8, "max_steps": 2, "dtype": "fp64"},
    }
    run = run_tiny(tiny_config(plugins=plugins, kit=True, distributed=layout, **tables), plugins)
    return [kept[0], run.losses]


@pytest.mark.parametrize("reads", [0, 3])
def test_masks_over_tensor_and_data_ranks(pool2: WorkerPool, reads: int) -> None:
    replicated = {"tp": 2, "sequence_parallel": False}
    first, second = pool2.run(masks, replicated, reads)
    torch.testing.assert_close(first[0], second[0], rtol=0, atol=1e-12)
    assert first[1] == second[1]
    alone = masks({}, 0)
    assert first[1] == pytest.approx(alone[1], rel=1e-12)
    first, second = pool2.run(masks, {"dp_shard": 2}, reads)
    assert not torch.equal(first[0] == 0, second[0] == 0)
