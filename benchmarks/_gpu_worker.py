"""One side of benchmarks/gpu.py: takes steps on the GPU when told to and says how long they took.

usage: _gpu_worker.py bare|forge
Speaks like _loop_worker.py, whose turns it takes: "ready SECONDS", then seconds for every line N. In Forge's
turns every step that does not log runs where a wait of the host for the device is an error.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import bare
import torch
import torch.nn.functional as F
from _loop_worker import ARRAY, Turns, bench_plugin, forge_flags
from torch import nn

SIZE = {
    "dim": 2048,
    "layers": 18,
    "heads": 16,
    "kv": 8,
    "hidden": 6144,
    "vocab": 32000,
    "seq": 2048,
    "mb": int(os.environ.get("BENCH_BATCH", "8")),
    "accum": 1,
}
"""1.04 billion parameters."""
LOG_INTERVAL = 1000


class GpuTurns(Turns):
    """Waits for the device at the end of a turn, and between turns."""

    def boundary(self) -> None:
        torch.cuda.set_sync_debug_mode("default")
        if self.left <= 1:
            torch.cuda.synchronize()
        super().boundary()


def bare_steps(turns: GpuTurns) -> None:
    """Compiled blocks under autocast, full logits, fused AdamW: what one would write by hand."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    net = bare.Net(SIZE).to(device)
    for layer in net.layers:
        layer.compile()
    matrices = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=3e-4,
        betas=(0.9, 0.95),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    data = torch.from_numpy(bare.tokens(SIZE)).pin_memory()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    parameters, at, rows = list(net.parameters()), 0, SIZE["mb"]
    while True:
        picked = order[at % (len(order) - rows) :][:rows]
        batch = data[picked].pin_memory().to(device, non_blocking=True)
        at += rows
        with torch.autocast("cuda", torch.bfloat16):
            logits = net(batch[:, :-1]).view(-1, SIZE["vocab"])
            loss = F.cross_entropy(logits.float(), batch[:, 1:].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        turns.boundary()


def forge_steps(turns: GpuTurns) -> None:
    """The same in Forge's words."""
    from forge_core.commands.loading import load
    from forge_core.contract import Observer
    from forge_core.loop.run import train
    from forge_core.plugins import Plugins

    class Watch(Observer):
        def step_end(self, session: Any, step: int, result: Any) -> None:
            turns.boundary()
            if (step + 1) % LOG_INTERVAL:
                torch.cuda.set_sync_debug_mode("error")

    with tempfile.TemporaryDirectory() as folder:
        plugins = Plugins.isolated({"bench": bench_plugin(Watch())})
        flags = [
            *forge_flags(SIZE, folder, compiled=True),
            *ARRAY,
            "--train.dtype=bf16",
            "--train.device=cuda",
            f"--metrics.log_interval={LOG_INTERVAL}",
        ]
        config, plugins = load(None, flags, plugins=plugins)
        train(config, plugins)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a run prints goes nowhere
    bare.SIZES["gpu"] = SIZE
    side = sys.argv[1]
    sys.argv[2:] = ["gpu"]  # where the data source looks for its size
    (bare_steps if side == "bare" else forge_steps)(GpuTurns(channel))
