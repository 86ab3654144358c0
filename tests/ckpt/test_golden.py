"""Checkpoints of earlier releases load, whole, and training goes on from them.

`tests/golden/checkpoint-FORMAT-RANKS` are checkpoints as they were saved, by runs of `golden_tables`. They
are never made anew: what this release writes is kept beside them. `python tests/ckpt/test_golden.py` makes
those that are missing.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from ckptkit import plugins_for, run
from rankskit import AtBegin

from forge_ckpt import open_checkpoint
from forge_ckpt.manifest import parse_manifest
from forge_ckpt.manifest import sums as checksums

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(GOLDEN.glob("checkpoint-*"))
STEPS = 4


def golden_tables() -> dict[str, Any]:
    return {
        "model": {"dim": 8, "n_layers": 1, "n_heads": 2, "ffn_hidden_dim": 16, "vocab_size": 32},
        "train": {"max_steps": STEPS + 2, "batch_size": 2, "seq_len": 8},
        "data": {"allow_changed": True},
        "scheduler": {"name": "constant"},
    }


def sums(folder: Path) -> dict[str, Any]:
    """Shape, dtype and exact sum of every tensor."""
    saved = open_checkpoint(folder)
    return {
        name: [list(info.shape), str(info.dtype), float(saved.tensor(name).double().sum()).hex()]
        for name, info in sorted(saved.index.tensors.items())
    }


def test_there_is_one_for_one_rank_and_one_for_two() -> None:
    assert {folder.name.rpartition("-")[2] for folder in FOLDERS} >= {"1", "2"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_it_is_whole_and_holds_what_it_held(folder: Path) -> None:
    place = folder / f"step_{STEPS:08d}"
    assert open_checkpoint(place).verify() == []
    assert sums(place) == json.loads((folder / "sums.json").read_text())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_training_goes_on_from_it(folder: Path, tmp_path: Path) -> None:
    begin = AtBegin()
    place = folder / f"step_{STEPS:08d}"
    table = {"interval": 0, "resume": str(place), "allow_changed": ["seed", "extras"]}
    plugins = plugins_for(hooks={"observers": [begin]})
    tables = golden_tables()
    tables["train"]["batch_size"] = 4 // open_checkpoint(place).manifest.world_size
    done = run(tmp_path, plugins=plugins, steps=STEPS + 2, checkpoint=table, **tables)
    assert begin.step == STEPS
    assert len(done.losses) == 2
    saved = open_checkpoint(place)
    for name in saved.index.tensors:
        assert torch.equal(begin.values[name], saved.tensor(name)), name


def save(folder: str, rows: int) -> int:
    """Train and save, on however many ranks there are; the format."""
    from forge_ckpt.manifest import FORMAT

    tables = golden_tables()
    tables["train"].update(max_steps=STEPS, batch_size=rows)
    run(Path(folder), steps=STEPS, checkpoint={"interval": STEPS}, **tables)
    return FORMAT


def without_places(folder: Path, place: str) -> None:
    """Take the names of temporary folders out of the configuration, and put its checksum right."""
    text = re.sub("  # .*", "", (folder / "config.toml").read_text()).replace(place, "runs")
    (folder / "config.toml").write_text(text)
    manifest = parse_manifest((folder / "manifest.json").read_bytes())
    files = {**manifest.files, **checksums([("config.toml", text.encode())])}
    (folder / "manifest.json").write_text(attrs.evolve(manifest, files=files).to_text())


def make() -> None:
    """Make golden checkpoints of this format, unless they are there."""
    from forge_core.testing import WorkerPool

    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as place, WorkerPool(2) as pool:
            form = save(place, 4) if ranks == 1 else pool.run(save, place, 2)[0]
            target = GOLDEN / f"checkpoint-{form}-{ranks}"
            if target.exists():
                continue
            name = f"step_{STEPS:08d}"
            shutil.copytree(Path(place) / "a/checkpoints" / name, target / name)
            without_places(target / name, place)
            (target / "sums.json").write_text(json.dumps(sums(target / name), indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    make()
