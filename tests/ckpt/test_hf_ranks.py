"""`model.init_from` on several ranks: the same weights, and the same training from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hfkit import FAMILIES, start, write_folder

from forge_core.testing import WorkerPool

LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP2": {"dp_shard": 2},
    "TP": {"tp": 2},
    "TP without sequence parallel": {"tp": 2, "sequence_parallel": False},
    "CP": {"cp": 2},
}


@pytest.mark.parametrize(
    "family",
    [name if name == "gemma2" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_a_folder_starts_the_same_run_on_any_layout(family: str, pool2: WorkerPool, tmp_path: Path) -> None:
    saved = write_folder(family, tmp_path / "hf")
    place = str(tmp_path / "hf")
    weights, losses, end = start(str(tmp_path / "one"), place, family, {}, 8)
    assert {name.removeprefix("model/") for name in weights} == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(weights[f"model/{name}"], tensor.double())
    for layout, sizes in LAYOUTS.items():
        rows = 4 if layout == "FSDP2" else 8
        for found in pool2.run(start, str(tmp_path / layout), place, family, sizes, rows):
            assert all(torch.equal(found[0][name], tensor) for name, tensor in weights.items()), layout
            assert found[1] == pytest.approx(losses, rel=1e-10), layout
            for name, tensor in end.items():
                torch.testing.assert_close(
                    found[2][name], tensor, rtol=1e-9, atol=1e-9, msg=f"{layout} {name}"
                )
