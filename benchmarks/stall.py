"""How long training stands still for a checkpoint, beside torch's own ways to save.

The same training steps run on, in one process, while each way in turn saves the same tensors (parameters and
AdamW state of a model of 55M parameters) to the same disk. Measured are, for each save:

- blocked: seconds that the training thread spent in the call and in waiting before the next update,
- durable: seconds from the call until all files are on disk,
- steps: time of a step while the save goes on, over that of the steps right before it.

usage: python benchmarks/stall.py [--rounds 24] [--check] [--json] [--dim 512]
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _common import Goal, Report, arguments, interval
from torch import Tensor

import forge_ckpt.plugin
from forge_ckpt.gathering import gather
from forge_core.testing import isolated_plugins, tiny_config, tiny_session

BLOCKED = Goal("blocked over durable", 0.03)
DURABLE = Goal("durable over that of dcp.save", 1.0)
STEPS = Goal("steps meanwhile over steps before", 1.35)
PAIRED = ("dcp.save", "forge async")
"""Ways in every round, one right after the other: their ratio has a goal."""
BEFORE = 3
"""Steps before each save whose time is the measure."""


class Way:
    """One way to save. `save` may return early; then `ended` holds the time when all was on disk."""

    def __init__(self, tensors: Callable[[], dict[str, Tensor]]) -> None:
        self.tensors = tensors
        self.ended = 0.0

    def save(self, folder: Path, step: int) -> None:
        raise NotImplementedError

    def staged(self) -> None:
        """Called before parameters and moments change."""

    def note(self, *_: object) -> None:
        self.ended = time.perf_counter()


class TorchSave(Way):
    """`torch.save` and fsync."""

    def save(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True)
        with (folder / "all.pt").open("wb") as file:
            torch.save(self.tensors(), file)
            file.flush()
            os.fsync(file.fileno())
        self.note()


class DcpSave(Way):
    """`dcp.save`."""

    def save(self, folder: Path, step: int) -> None:
        dcp.save(self.tensors(), checkpoint_id=folder, no_dist=True)
        self.note()


class DcpAsync(Way):
    """`dcp.async_save` as it comes: it copies before it returns."""

    stager: Any = None

    def save(self, folder: Path, step: int) -> None:
        more = {} if self.stager is None else {"async_stager": self.stager}
        answer: Any = dcp.async_save(self.tensors(), checkpoint_id=folder, no_dist=True, **more)
        self.staging = getattr(answer, "staging_completion", None)
        getattr(answer, "upload_completion", answer).add_done_callback(self.note)

    def staged(self) -> None:
        waiting, self.staging = getattr(self, "staging", None), None
        if waiting is not None:
            waiting.result()


class DcpStager(DcpAsync):
    """`dcp.async_save` with a stager that copies to shared memory on a thread."""

    def __init__(self, tensors: Callable[[], dict[str, Tensor]]) -> None:
        super().__init__(tensors)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )


class ForgeSave(Way):
    """Forge, in one of its modes."""

    def __init__(self, keeper: Any, session: Any, mode: str) -> None:
        super().__init__(dict)
        self.keeper, self.session, self.mode = keeper, session, mode

    def save(self, folder: Path, step: int) -> None:
        import attrs

        self.keeper.config = attrs.evolve(self.keeper.config, mode=self.mode)
        self.keeper.save(self.session, step, "scheduled")
        self.going = self.keeper.running
        if self.going is None:
            self.note()
        else:
            self.going.done.add_done_callback(self.note)

    def note(self, *_: object) -> None:
        # what follows the rename (removing the old one) is no part of it
        self.ended = self.going.durable_at if self.going is not None else time.perf_counter()

    def staged(self) -> None:
        self.keeper.staged()


class Timed:
    """Stands in for the checkpointer of the session: passes `staged` on and counts the time."""

    def __init__(self) -> None:
        self.way: Way | None = None
        self.seconds = 0.0

    def staged(self) -> None:
        began = time.perf_counter()
        if self.way is not None:
            self.way.staged()
        self.seconds += time.perf_counter() - began


def measure(session: Any, timed: Timed, way: Way, folder: Path, number: int) -> dict[str, float]:
    """One save with the steps around it."""

    def step() -> float:
        began = time.perf_counter()
        session.step_fn.train(session, session.step + 1)
        session.step += 1
        return time.perf_counter() - began

    before = statistics.median(step() for _ in range(BEFORE))
    timed.way, timed.seconds, way.ended = way, 0.0, 0.0
    began = time.perf_counter()
    way.save(folder, number)
    call = time.perf_counter() - began
    during = []
    while way.ended == 0.0 or not during:
        during.append(step())
    timed.way = None
    whole = during[:-1] or during  # the last one is only partly beside the save
    return {
        "blocked": call + timed.seconds,
        "durable": way.ended - began,
        "steps": statistics.mean(whole) / before,
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=24, help="saves by Forge and by dcp.save")
    parser.add_argument(
        "--others", type=int, default=4, help="rounds of which one has the other ways, too; 0: none"
    )
    parser.add_argument("--dim", type=int, default=512, help="width of the model")
    parser.add_argument("--threads", type=int, default=2, help="cores that training takes")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no round begins")
    options = parser.parse_args()
    report = Report("stall", ["case", "blocked", "durable", "steps", "value", "95 % interval", "goal"])
    place = Path(tempfile.mkdtemp(prefix="stall-", dir=os.environ.get("STALL_DIR")))
    plugins = isolated_plugins({"checkpoint": forge_ckpt.plugin})
    config = tiny_config(
        plugins=plugins,
        checkpoint={"keep_last": 1},
        run={"dir": str(place), "name": "forge"},
        model={
            "dim": options.dim,
            "n_layers": 8,
            "n_heads": 8,
            "ffn_hidden_dim": options.dim * 11 // 4,
            "vocab_size": 32000,
        },
        train={"batch_size": 1, "seq_len": 128, "grad_accum_steps": 2},
    )
    began = time.perf_counter()
    with tiny_session(config, plugins) as session:
        torch.set_num_threads(options.threads)
        session.run.create()
        keeper, timed = session.checkpointer, Timed()
        keeper.load(session)
        session.checkpointer = timed

        def tensors() -> dict[str, Tensor]:
            return gather(session, keeper.values).live

        total = sum(t.numel() for n, t in tensors().items() if n.startswith("model/"))
        print(f"{total / 1e6:.1f}M parameters")
        ways: dict[str, Way] = {
            "torch.save + fsync": TorchSave(tensors),
            "dcp.save": DcpSave(tensors),
            "dcp.async_save": DcpAsync(tensors),
            "dcp.async_save, stager": DcpStager(tensors),
            "forge sync": ForgeSave(keeper, session, "sync"),
            "forge async": ForgeSave(keeper, session, "async"),
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for number in range(-1, options.rounds):
            if number > 0 and time.perf_counter() - began > options.budget:
                break
            everyone = options.others and (number < 0 or number % options.others == 0)
            order = list(ways if everyone else PAIRED)
            shift = number % len(order)
            for name in order[shift:] + order[:shift]:
                folder = place / "other"
                result = measure(session, timed, ways[name], folder, session.step)
                keeper.drain()
                shutil.rmtree(folder, ignore_errors=True)
                print(number, name, result, file=sys.stderr, flush=True)
                if number >= 0:  # the first round makes buffers
                    found[name].append(result)
        keeper.close()
    shutil.rmtree(place, ignore_errors=True)
    tell(report, found)
    report.finish(options)


def tell(report: Report, found: dict[str, list[dict[str, float]]]) -> None:
    """Medians of every way, and the ratios that have goals."""
    for name, results in found.items():
        if not results:
            continue
        middle = {key: statistics.median(r[key] for r in results) for key in ("blocked", "durable", "steps")}
        columns = {"blocked_seconds": middle["blocked"], "durable_seconds": middle["durable"]}
        mine = name == "forge async"
        ratio = interval([r["blocked"] / r["durable"] for r in results])
        report.ratio(name, BLOCKED if mine else None, ratio, **columns, steps=middle["steps"])
    mine, theirs = found["forge async"], found["dcp.save"]
    ratios = [a["durable"] / b["durable"] for a, b in zip(mine, theirs, strict=True)]
    report.ratio(
        "durable, forge async over dcp.save", DURABLE, interval(ratios), **columns, steps=middle["steps"]
    )
    steps = interval([r["steps"] for r in mine])
    report.ratio("steps meanwhile, forge async", STEPS, steps, **columns, steps=middle["steps"])


if __name__ == "__main__":
    main()
