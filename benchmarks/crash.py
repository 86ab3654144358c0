"""Runs that are killed over and over, at random moments, and must end as if nothing had happened.

Every rank gets SIGKILL at once, a random time after training began. The next start must go on from the newest
complete checkpoint, and the end of each run must have the bits of a run that was never killed: weights,
moments, counters. Runs with one and with two ranks, saving in the foreground and in the background, after
every update.

Every second kill waits, after its random time, for a save to be under way, and a random moment more. A kill
counts as "while saving" when it left a file of an unfinished save behind: it came between the first byte and
the rename.

usage: python benchmarks/crash.py [--kills 100] [--check] [--json]
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # processes are forked from this one, which may have no threads

import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from _common import Goal, Report, arguments

import forge_ckpt.checkpointer
import forge_ckpt.plugin
import forge_core.loop.run
from forge_ckpt import open_checkpoint
from forge_ckpt.errors import CheckpointError
from forge_core.contract.runtime import Observer
from forge_core.testing import isolated_plugins, plugin_object, tiny_config

FAILED = Goal("kills after which a run did not go on, or ended otherwise", 0)
RUNS = ((1, "async"), (2, "async"), (1, "sync"), (2, "sync"))
STEPS = 30
LONGEST = 0.5
"""Seconds after the beginning of training within which the kill comes."""
SHORTEST = 0.02
"""Seconds within which a kill comes that waited for a save."""
LIMIT = 60.0
"""Seconds that a start may take at all."""


class Tell(Observer):
    """Tells the parent the step that training goes on from."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def train_begin(self, session: Any) -> None:
        os.write(self.pipe, f"{session.step}\n".encode())


def train(folder: Path, ranks: int, rank: int, port: int, mode: str, pipe: int) -> int:
    """One rank, from here to the end of the run; its exit status."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    if ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    tell = plugin_object(forge_observers=lambda: [Tell(pipe)])
    plugins = isolated_plugins({"checkpoint": forge_ckpt.plugin, "tell": tell})
    config = tiny_config(
        plugins=plugins,
        world_size=ranks,
        tell=True,
        run={"name": "a", "dir": str(folder)},
        checkpoint={"interval": 1, "keep_last": 2, "mode": mode},
        model={"dim": 128, "n_layers": 4, "n_heads": 4, "ffn_hidden_dim": 512, "vocab_size": 512},
        train={"max_steps": STEPS, "batch_size": 4 // ranks},
        eval={"at_end": False},
    )
    return forge_core.loop.run.train(config, plugins)


def start(folder: Path, ranks: int, mode: str) -> tuple[list[int], int]:
    """Fork the ranks of a run; their process ids, and a pipe that tells the first step of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reading, writing = os.pipe()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.close(reading)
                sink = os.open(folder / f"output{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(sink, 1)
                os.dup2(sink, 2)
                status = train(folder, ranks, rank, port, mode, writing)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        children.append(child)
    os.close(writing)
    return children, reading


def first_steps(pipe: int, ranks: int) -> list[int]:
    """The step that each rank begins from; fewer where one ended before."""
    text = b""
    while text.count(b"\n") < ranks:
        piece = os.read(pipe, 4096)
        if not piece:
            break
        text += piece
    return [int(line) for line in text.split()]


def until_saving(folder: Path, more: float) -> None:
    """Wait until a save is under way, and `more` seconds; for a second at most."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and not while_saving(folder):
        time.sleep(0.0005)
    time.sleep(more)


def end(children: list[int], seconds: float) -> list[int]:
    """Wait until all have ended by themselves, or kill all of them at once; exit statuses, -9 for killed."""
    deadline = time.monotonic() + seconds
    alive, statuses = list(children), {}
    while alive and time.monotonic() < deadline:
        for child in tuple(alive):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[child] = os.waitstatus_to_exitcode(status)
                alive.remove(child)
        time.sleep(0.001)
    for child in alive:
        os.kill(child, signal.SIGKILL)
    for child in alive:
        statuses[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return [statuses[child] for child in children]


def newest(folder: Path) -> int:
    """The step of the newest complete checkpoint, 0 for none."""
    try:
        return open_checkpoint(folder / "a").manifest.step
    except CheckpointError:
        return 0


def while_saving(folder: Path) -> bool:
    """Whether an unfinished save lies there, of which at least a byte was written."""
    return any(p.is_file() and p.stat().st_size for p in folder.glob("a/checkpoints/.saving_*/**/*"))


def same_end(folder: Path, straight: Path) -> bool:
    """Whether the last checkpoints hold the same bits, but for when and where they were saved."""
    one, other = open_checkpoint(folder / "a"), open_checkpoint(straight / "a")
    if (one.manifest.step, set(one.index.tensors)) != (STEPS, set(other.index.tensors)):
        return False
    states = [{k: v for k, v in c.state().items() if k not in ("surroundings",)} for c in (one, other)]
    equal = all(torch.equal(one.tensor(name), other.tensor(name)) for name in one.index.tensors)
    return equal and states[0] == states[1] and not one.verify()


def kill_over_and_over(
    place: Path, ranks: int, mode: str, kills: int, generator: random.Random, deadline: float
) -> dict[str, int]:
    """Chains of starts and kills until there were `kills`; what became of them."""
    straight = place / f"straight{ranks}"
    if not straight.exists():
        straight.mkdir()
        children, pipe = start(straight, ranks, mode)
        first_steps(pipe, ranks)
        os.close(pipe)
        statuses = end(children, LIMIT)
        assert not any(statuses), f"the run that is not killed ended with {statuses}"
    counts = {"kills": 0, "saving": 0, "failed": 0, "runs": 0}
    folder = None
    while counts["kills"] < kills and time.monotonic() < deadline:
        if folder is None:
            folder = place / f"run{ranks}{mode}{counts['runs']}"
            folder.mkdir()
        before = newest(folder)
        children, pipe = start(folder, ranks, mode)
        steps = first_steps(pipe, ranks)
        os.close(pipe)
        if steps != [before] * ranks:
            counts["failed"] += 1
            print(f"{folder}: began from {steps}, not {before}", file=sys.stderr, flush=True)
            end(children, 0.0)
            break
        wait = generator.uniform(0.0, LONGEST)
        if counts["kills"] % 2:
            time.sleep(wait)
            until_saving(folder, generator.uniform(0.0, SHORTEST))
            wait = 0.0
        statuses = end(children, wait)
        if all(status == -signal.SIGKILL for status in statuses):
            counts["kills"] += 1
            counts["saving"] += while_saving(folder)
        elif any(status not in (0, -signal.SIGKILL) for status in statuses):
            counts["failed"] += 1
            print(f"{folder}: ended with {statuses}", file=sys.stderr, flush=True)
            break
        if newest(folder) == STEPS:
            children, pipe = start(folder, ranks, mode)  # let it end, if it has not
            os.close(pipe)
            end(children, LIMIT)
            counts["failed"] += not same_end(folder, straight)
            counts["runs"] += 1
            shutil.rmtree(folder)
            folder = None
    if folder is not None and not counts["failed"]:  # to the end, without kills
        children, pipe = start(folder, ranks, mode)
        first_steps(pipe, ranks)
        os.close(pipe)
        end(children, LIMIT)
        counts["failed"] += not same_end(folder, straight)
        counts["runs"] += 1
    return counts


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no start begins")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("crash", ["case", "kills", "while saving", "runs", "value", "", "goal"])
    generator = random.Random(options.seed)
    place = Path(tempfile.mkdtemp(prefix="crash-"))
    total = {"kills": 0, "saving": 0, "failed": 0, "runs": 0}
    began = time.monotonic()
    for number, (ranks, mode) in enumerate(RUNS):
        share = (options.kills - total["kills"]) // (len(RUNS) - number)
        deadline = began + options.budget * (number + 1) / len(RUNS)
        counts = kill_over_and_over(place, ranks, mode, share, generator, deadline)
        total = {key: total[key] + counts[key] for key in total}
        numbers = {"kills": counts["kills"], "saving": counts["saving"], "runs": counts["runs"]}
        report.value(f"{ranks} rank(s), {mode}", FAILED, counts["failed"], **numbers)
    numbers = {"kills": total["kills"], "saving": total["saving"], "runs": total["runs"]}
    report.value("all", FAILED, total["failed"], **numbers)
    few = Goal("kills less than asked for", 0)
    report.value("kills missing", few, max(0, options.kills - total["kills"]), **numbers)
    asked = round(0.4 * options.kills)
    report.value("kills while saving missing", few, max(0, asked - total["saving"]), **numbers)
    if not total["failed"]:
        shutil.rmtree(place)
    report.finish(options)


if __name__ == "__main__":
    main()
