"""One rank of one side of benchmarks/scale.py: takes steps when told to, and counts collectives when told to.

usage: _scale_worker.py bare|forge SIZE ACCUMULATE, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set
Rank 0 speaks over stdin and stdout: "ready" after the first step, then for every line N it runs N steps and
answers with the seconds they took; for a line "count" it runs one and answers with its collectives, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bare
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _loop_worker import ARRAY, bench_plugin, forge_flags
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

SIDES = ("bare", "forge")


class Collectives(TorchDispatchMode):
    """Counts what ranks say to each other, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls again with what it does
        name = func.__name__.partition(".")[0].strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "wrap")):
            self.counts[name] += 1  # not what waits for them and wraps tensors
        return func(*args, **(kwargs or {}))


class Turns:
    """Hands the processes to their partners between steps. Only rank 0 is asked: the others wait for it in
    collectives."""

    def __init__(self, out: Any) -> None:
        self.out, self.left, self.began = out, 1, 0.0
        self.counting: Collectives | None = None
        self.asked = os.environ["RANK"] == "0"

    def boundary(self) -> None:
        """Between two steps."""
        now = time.perf_counter()
        self.left -= 1
        if not self.asked or self.left > 0:
            return
        self.out.write(self._answer(now) + "\n")
        self.out.flush()
        line = sys.stdin.readline().strip()
        if not line:
            os._exit(0)
        if line == "count":
            self.counting = Collectives()
            self.counting.__enter__()
        self.left = 1 if line == "count" else int(line)
        self.began = time.perf_counter()

    def _answer(self, now: float) -> str:
        counting, self.counting = self.counting, None
        if counting is not None:
            counting.__exit__(None, None, None)
            return json.dumps(counting.counts)
        return f"{now - self.began:.6f}" if self.began else "ready"


def bare_steps(size: dict[str, int]) -> Iterator[None]:
    """FSDP2 as its tutorial has it: a unit a layer and the root, gradients reduced with the last
    micro-batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model: Any = bare.Net(size)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=3e-4,
        betas=(0.9, 0.95),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    data = torch.from_numpy(bare.tokens(size))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    rows, accumulate, at = size["mb"], size["accum"], dist.get_rank() * size["mb"]
    while True:
        yield
        for number in range(accumulate):
            model.set_requires_gradient_sync(number + 1 == accumulate)
            batch = data[order[at % (len(order) - rows) :][:rows]]
            at += rows * dist.get_world_size()
            logits = model(batch[:, :-1]).view(-1, size["vocab"])
            (F.cross_entropy(logits, batch[:, 1:].reshape(-1)) / accumulate).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)


def run_bare(size: dict[str, int], turns: Turns) -> None:
    iterator = bare_steps(size)
    next(iterator)
    while True:
        next(iterator)
        turns.boundary()


def run_forge(size: dict[str, int], turns: Turns) -> None:
    from forge_core.commands.loading import load
    from forge_core.contract import Observer
    from forge_core.loop.run import train
    from forge_core.plugins import Plugins

    class Watch(Observer):
        def step_end(self, session: Any, step: int, result: Any) -> None:
            turns.boundary()

    plugins = Plugins.isolated({"bench": bench_plugin(Watch())})
    folder = os.environ["BENCH_FOLDER"]
    flags = [*forge_flags(size, folder), *ARRAY, "--metrics.log_interval=1000000", "--run.name=scale"]
    config, plugins = load(None, flags, world_size=int(os.environ["WORLD_SIZE"]), plugins=plugins)
    train(config, plugins)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a run prints goes nowhere
    side, size_name, micro_batches = sys.argv[1:4]
    shape = {**bare.SIZES[size_name], "accum": int(micro_batches)}
    (run_bare if side == "bare" else run_forge)(shape, Turns(channel))
