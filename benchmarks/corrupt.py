"""Damage to checkpoints, and what looking for it costs.

A bit is flipped, a file cut or removed, at random over all files of a checkpoint; each time the checkpoint
must be refused with the name of the file, and a run that resumes must take the one before. Then, on a model
of 55M parameters, a load with verification is timed beside one without.

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
from _common import Goal, Report, arguments, interval, paired

import forge_ckpt.checkpointer
import forge_ckpt.plugin
from forge_ckpt.choosing import newest_whole
from forge_ckpt.comm import Control
from forge_ckpt.errors import DamagedError
from forge_ckpt.reading import SavedCheckpoint
from forge_ckpt.resuming import resume
from forge_ckpt.store import LocalStore
from forge_ckpt.table import CheckpointConfig
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


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--dim", type=int, default=512, help="width of the model that is loaded")
    options = parser.parse_args()
    report = Report("corrupt", ["case", "load", "verify", "value", "95 % interval", "goal"])
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
        assert isinstance(keeper, forge_ckpt.checkpointer.RunCheckpointer)
        keeper.load(session)
        keeper.save(session, 1, "scheduled")
        table = attrs.evolve(keeper.config, verify=False)

        def load() -> None:
            resume(session, SavedCheckpoint(keeper.store, "step_00000001"), table, Control())

        def verify() -> None:
            assert SavedCheckpoint(keeper.store, "step_00000001").verify() == []

        torch.set_num_threads(1)
        found = paired(load, verify, options.pairs or 20, budget=240)
        keeper.close()
    seconds = {"load_seconds": sorted(found.first)[len(found.first) // 2]}
    seconds["verify_seconds"] = sorted(found.second)[len(found.second) // 2]
    ratios = [b / a for a, b in zip(found.first, found.second, strict=True)]
    report.ratio("verification over loading", COST, interval(ratios), **seconds)
    shutil.rmtree(place)
    report.finish(options)


if __name__ == "__main__":
    main()
