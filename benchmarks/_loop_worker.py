"""One side of benchmarks/loop.py: takes steps when told to and says how long they took.

usage: _loop_worker.py bare|forge SIZE eager|compiled
Speaks over stdin and stdout: "ready SECONDS" (from process start to the end of the first step), then for
every line N it runs N steps and answers with the seconds they took.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGAN = float(os.environ.get("BENCH_BEGAN", time.time()))

import bare  # noqa: E402  (the clock starts before torch is imported)
import numpy as np  # noqa: E402


def forge_flags(size: dict[str, int], folder: str, compiled: bool = False) -> list[str]:
    """The same run in Forge's words, but for its data."""
    return [
        f"--run.dir={folder}",
        f"--model.dim={size['dim']}",
        f"--model.n_layers={size['layers']}",
        f"--model.n_heads={size['heads']}",
        f"--model.n_kv_heads={size['kv']}",
        f"--model.ffn_hidden_dim={size['hidden']}",
        f"--model.vocab_size={size['vocab']}",
        "--data.pack=false",
        "--data.holdout=0",
        f"--train.batch_size={size['mb']}",
        f"--train.seq_len={size['seq']}",
        f"--train.grad_accum_steps={size['accum']}",
        f"--train.compile={str(compiled).lower()}",
        "--train.max_steps=1000000",
        "--optimizer.no_decay=[norm, bias]",
        "--scheduler.name=constant",
        "--scheduler.warmup_steps=10",
        "--metrics.progress=plain",
    ]


ARRAY = ("--bench=true", "--data.source=bench/array")


class ArraySource:
    """Random tokens in memory, the ones of the bare loop."""

    fingerprint = "bench"

    def __init__(self, rows: np.ndarray[Any, Any]) -> None:
        self.rows = rows
        self.max_token = int(rows.max())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": self.rows[index, :-1], "targets": self.rows[index, 1:]}

    def batch(self, indices: Any) -> dict[str, Any]:
        rows = self.rows[indices]
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def build_array(spec: Any, options: Any) -> ArraySource:
    """The data source `bench/array`."""
    return ArraySource(bare.tokens(bare.SIZES[sys.argv[2]]))


def bench_plugin(observer: Any) -> Any:
    """A plugin with the data source and an observer that hears of every step."""
    from forge_core import hookimpl
    from forge_core.contract import Component

    class Plugin:
        @staticmethod
        @hookimpl
        def forge_components() -> list[Any]:
            return [Component(category="data_source", name="array", target="_loop_worker:build_array")]

        @staticmethod
        @hookimpl
        def forge_observers() -> list[Any]:
            return [observer]

    return Plugin()


class Turns:
    """Hands the process to its partner between steps."""

    def __init__(self, out: Any) -> None:
        self.out, self.left, self.began = out, 1, 0.0

    def boundary(self) -> None:
        """Between two steps."""
        now = time.perf_counter()
        if self.left:
            self.left -= 1
            if self.left:
                return
        if self.began:
            self.say(f"{now - self.began:.6f}")
        else:
            self.say(f"ready {time.time() - BEGAN:.3f}")
        line = sys.stdin.readline().strip()
        if not line:
            os._exit(0)
        self.left, self.began = int(line), time.perf_counter()

    def say(self, text: str) -> None:
        self.out.write(text + "\n")
        self.out.flush()


def run_bare(size: dict[str, int], compiled: bool, turns: Turns) -> None:
    iterator: Iterator[None] = bare.steps(size, compiled)
    next(iterator)
    while True:
        next(iterator)
        turns.boundary()


def run_forge(size: dict[str, int], compiled: bool, turns: Turns) -> None:
    from forge_core.commands.loading import load
    from forge_core.contract import Observer
    from forge_core.loop.run import train
    from forge_core.plugins import Plugins

    class Watch(Observer):
        def step_end(self, session: Any, step: int, result: Any) -> None:
            turns.boundary()

    with tempfile.TemporaryDirectory() as folder:
        plugins = Plugins.isolated({"bench": bench_plugin(Watch())})
        config, plugins = load(None, [*forge_flags(size, folder, compiled), *ARRAY], plugins=plugins)
        train(config, plugins)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.modules["_loop_worker"] = sys.modules["__main__"]
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a run prints goes nowhere
    kind, size_name, mode = sys.argv[1:4]
    run = run_bare if kind == "bare" else run_forge
    run(bare.SIZES[size_name], mode == "compiled", Turns(channel))
