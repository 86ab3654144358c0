"""Damage to checkpoints, and what looking for it costs.

A bit is flipped, a file cut or removed, at random over all files of a checkpoint; each time the checkpoint
must be refused with the name of the file, and a run that resumes must take the one before. Then, on a model
of 55M parameters whose checkpoint the system has in its cache, verification is timed beside a load. Two rows
without a goal say what stands behind that: what verification adds to a load that comes after it, as it maps
the same pages; and all cores reading as many bytes once from memory, which no checksum can be faster than. A
load moves every byte about three times (read, room made in the cache, written).

usage: python benchmarks/corrupt.py [--damages 200] [--check] [--json]
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path

import attrs
import torch
from _common import Goal, Pairs, Report, arguments, paired

import forge_ckpt.plugin
from forge_ckpt.checkpointer import RunCheckpointer
from forge_ckpt.choosing import newest_whole
from forge_ckpt.comm import Control
from forge_ckpt.errors import DamagedError
from forge_ckpt.reading import SavedCheckpoint
from forge_ckpt.resuming import resume
from forge_ckpt.store import LocalStore
from forge_ckpt.table import CheckpointConfig
from forge_core.loop.session import TrainingSession
from forge_core.testing import isolated_plugins, run_tiny, tiny_config, tiny_session

MISSED = Goal("damages not noticed, or noticed and loaded", 0)
COST = Goal("seconds to verify over seconds to load", 0.3)


def damage(folder: Path, generator: random.Random) -> str:
    """Harm one file; its name."""
    file = generator.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    size, kind = file.stat().st_size, generator.choice(("flip", "cut", "remove"))
    if kind == "remove":
        file.unlink()
    elif kind == "cut":
        os.truncate(file, generator.randrange(size))
    else:
        with file.open("r+b") as opened:
            opened.seek(generator.randrange(size))
            byte = opened.read(1)[0] ^ 1 << generator.randrange(8)
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte]))
    return str(file.relative_to(folder))


def noticed(store: LocalStore, file: str, step: int) -> bool:
    """Whether the damage is named, and a resume takes the checkpoint before."""
    try:
        words = " ".join(map(str, SavedCheckpoint(store, f"step_{step:08d}").verify()))
    except DamagedError as error:
        words = str(error)
    taken = newest_whole(store, CheckpointConfig(), Control())
    return file in words and taken is not None and taken.manifest.step == step - 1


def harm(place: Path, times: int, generator: random.Random) -> int:
    """How many of so many damages went unnoticed."""
    plugins = isolated_plugins({"checkpoint": forge_ckpt.plugin})
    table = {"interval": 1, "mode": "sync"}
    config = tiny_config(plugins=plugins, checkpoint=table, run={"name": "a"}, train={"max_steps": 2})
    run_tiny(config, plugins, folder=place)
    folder = place / "a/checkpoints"
    store, last = LocalStore(folder), folder / "step_00000002"
    kept = place / "kept"
    last.rename(kept)
    missed = 0
    for _ in range(times):
        shutil.copytree(kept, last)
        missed += not noticed(store, damage(last, generator), 2)
        shutil.rmtree(last)
    return missed


def told(report: Report, case: str, goal: Goal | None, found: Pairs) -> None:
    """A row: seconds of a load, of what is beside it, and their ratio."""
    load, beside = (sorted(side)[len(side) // 2] for side in (found.first, found.second))
    report.ratio(case, goal, found.ratio(), load_seconds=load, verify_seconds=beside)


def timed(report: Report, session: TrainingSession, pairs: int) -> None:
    """Rows for verification, what it adds to a load, and the least that a checksum can cost."""
    keeper = session.checkpointer
    assert isinstance(keeper, RunCheckpointer)
    table = attrs.evolve(keeper.config, verify=False)

    def opened() -> SavedCheckpoint:
        return SavedCheckpoint(keeper.store, "step_00000001")

    def load() -> None:
        resume(session, opened(), table, Control())

    def verify() -> None:
        assert opened().verify() == []

    def load_verified() -> None:
        saved = opened()
        assert saved.verify() == []
        resume(session, saved, table, Control())

    words = torch.ones(opened().manifest.size // 8, dtype=torch.int64)
    cores = torch.get_num_threads()

    def read_once() -> None:
        torch.set_num_threads(cores)
        words.sum()
        torch.set_num_threads(1)

    torch.set_num_threads(1)
    told(report, "verification over loading", COST, paired(load, verify, pairs, budget=120))
    added = paired(load, load_verified, pairs, budget=120)
    more = [both - alone for alone, both in zip(added.first, added.second, strict=True)]
    told(report, "what it adds to a load", None, Pairs(added.first, more))
    told(report, "one reading of as many bytes", None, paired(load, read_once, pairs, budget=60))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--dim", type=int, default=512, help="width of the model that is loaded")
    options = parser.parse_args()
    report = Report("corrupt", ["case", "load", "beside it", "value", "95 % interval", "goal"])
    place = Path(tempfile.mkdtemp(prefix="corrupt-"))
    missed = harm(place, options.damages, random.Random(0))
    nothing = {"load_seconds": 0.0, "verify_seconds": 0.0}
    report.value(f"{options.damages} damages", MISSED, missed, **nothing)
    plugins = isolated_plugins({"checkpoint": forge_ckpt.plugin})
    size = {"dim": options.dim, "n_layers": 8, "n_heads": 8, "ffn_hidden_dim": options.dim * 11 // 4}
    config = tiny_config(
        plugins=plugins,
        checkpoint={"mode": "sync"},
        model={**size, "vocab_size": 32000},
        run={"name": "b", "dir": str(place)},
    )
    with tiny_session(config, plugins) as session:
        keeper = session.checkpointer
        assert isinstance(keeper, RunCheckpointer)
        keeper.load(session)
        keeper.save(session, 1, "scheduled")
        timed(report, session, options.pairs or 20)
        keeper.close()
    shutil.rmtree(place)
    report.finish(options)


if __name__ == "__main__":
    main()
