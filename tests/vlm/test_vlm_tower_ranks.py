"""Towers of transformers that train on several ranks: losses and weights are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vlmkit import mixed_records, write_samples
from vlmruns import of, run, same

from forge_core.testing.pool import WorkerPool

pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 24,
}


@pytest.mark.parametrize("name", ["clip", "idefics3"])
def test_a_tower_trains_on_two_ranks_as_on_one(pool2: WorkerPool, tmp_path: Path, name: str) -> None:
    """CLIP's last block and last norm, behind the states that are taken, move by decay alone, if at all."""
    write_samples(tmp_path, mixed_records(40))
    encoder = {"name": name, name: SIZES, "frozen": False}
    more: dict[str, Any] = {"vlm": {"encoder": encoder}}
    expected = run(of(tmp_path, **more))
    for found in pool2.run(run, of(tmp_path, 2, **more)):
        same(found, expected)
