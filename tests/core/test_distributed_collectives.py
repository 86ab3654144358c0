"""A step makes the collectives of a bare FSDP2 loop that clips, and one small reduction."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from distributedkit import TABLES, plugins_of
from torch import nn
from torch.profiler import ProfilerActivity, profile

from forge_core.testing import WorkerPool, run_tiny, tiny_config

LAYERS = 3


class Collectives:
    """Counts collectives by name where they all come by, those of DTensors, too."""

    def __init__(self) -> None:
        self.profile = profile(activities=[ProfilerActivity.CPU])

    def __enter__(self) -> Collectives:
        self.profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.profile.__exit__(*error)

    @property
    def found(self) -> dict[str, int]:
        names = (event.name for event in self.profile.events() or ())
        return dict(Counter(name.removeprefix("c10d::") for name in names if name.startswith("c10d::")))


def of_forge(accumulate: int) -> dict[str, int]:
    """Collectives of update 3, which does not log."""
    from forge_core.contract.runtime import Observer

    class Count(Observer):
        def __init__(self) -> None:
            self.mode = Collectives()
            self.found: dict[str, int] = {}

        def step_end(self, session: Any, step: int, result: Any) -> None:
            if step == 2:
                self.mode.__enter__()
            if step == 3:
                self.mode.__exit__(None, None, None)
                self.found = self.mode.found

    counter = Count()
    plugins = plugins_of(forge_observers=lambda: [counter])
    tables = {
        **TABLES,
        "model": {"vocab_size": 40, "n_layers": LAYERS},
        "train": {"batch_size": 2, "seq_len": 8, "max_steps": 4, "grad_accum_steps": accumulate},
        "metrics": {"log_interval": 4},
    }
    run_tiny(tiny_config(plugins=plugins, kit=True, **tables), plugins)
    return counter.found


def of_a_bare_loop(accumulate: int) -> dict[str, int]:
    """Collectives of one step of a plain loop: blocks and root sharded, gradients reduced on the last
    micro-batch, clipped by torch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model: Any = nn.Sequential(nn.Linear(4, 4), *(nn.Linear(4, 4) for _ in range(LAYERS)), nn.Linear(4, 4))
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with Collectives() as mode:
            for i in range(accumulate):
                model.set_requires_gradient_sync(i == accumulate - 1)
                model(torch.ones(2, 4)).sum().backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            _ = norm
    return mode.found


@pytest.mark.parametrize("accumulate", [1, 4])
def test_one_small_reduction_more_than_a_bare_loop(pool2: WorkerPool, accumulate: int) -> None:
    ours = pool2.run(of_forge, accumulate)[0]
    bare = pool2.run(of_a_bare_loop, accumulate)[0]
    print(f"accumulation {accumulate}: forge {ours}, bare {bare}")
    assert ours.pop("allreduce_") == bare.pop("allreduce_", 0) + 1
    assert ours == bare
    assert ours["_reduce_scatter_base_"] == LAYERS + 1  # once a step, whatever the micro-batches
