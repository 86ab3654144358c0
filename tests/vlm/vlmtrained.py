"""A folder of Hugging Face as the start of a run on pictures of many sizes, and the run as such a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w
import torch
from vlmfamilies import tokenizer
from vlmkit import merged
from vlmsizes import write_sizes

from forge_core.commands.loading import load
from forge_core.plugins import Plugins
from forge_core.testing import run_tiny


def trained_and_back(
    folder: Path, family: str, write: Callable[[Path], Path] = write_sizes, **more: Any
) -> Path:
    """Import `folder / "hf"`, train two updates from it, and export what was trained.

    Every weight comes from the folder, all but those of the frozen tower move, and what is written is what
    was trained.

    Args:
        write: puts samples into a folder. more: tables of the run.

    Returns:
        The folder of the run.
    """
    from forge_ckpt.hf.exporting import export_hf
    from forge_ckpt.hf.importing import import_hf
    from forge_ckpt.hf.opening import open_model
    from forge_ckpt.hf.start import tensors_of

    tokenizer().save_pretrained(folder / "hf")
    import_hf(folder / "hf", folder / "theirs")
    (folder / "samples").mkdir()
    samples = str(write(folder / "samples"))
    tables: dict[str, Any] = {
        "extends": "theirs/model.toml",
        "run": {"name": "mine"},
        "model": {"init_from": str(folder / "theirs")},
        "vlm": {"max_images": 2},
        "data": {
            "source": "vlm/images",
            "path": samples,
            "holdout": 0.0,
            "tokenizer": str(folder / "theirs"),
        },
        "train": {"device": "cpu", "dtype": "fp32", "batch_size": 2, "max_steps": 2},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"mode": "sync"},
        "eval": {"steps": 0, "sample": False},
    }
    (folder / "mine.toml").write_text(tomli_w.dumps(merged(tables, more)), encoding="utf-8")
    plugins = Plugins()
    config, _ = load(str(folder / "mine.toml"), (), plugins=plugins)
    done = run_tiny(config, plugins, folder=folder / "runs")
    start, trained = open_model(folder / "theirs"), tensors_of(done.session.model)
    assert set(trained) == set(start.weights.names())
    same = {name for name in trained if torch.equal(trained[name].detach(), start.weights.read(name))}
    assert same == {name for name in trained if name.startswith("encoder.")}
    assert export_hf(open_model(done.folder), folder / "out").model_type == family
    again = open_model(folder / "out")
    assert set(again.weights.names()) == set(trained)
    for name in again.weights.names():
        assert torch.equal(again.weights.read(name), trained[name].detach()), name
    return done.folder
