"""A mixture of images, videos and text, saved and gone on from on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.testing.pool import WorkerPool


@pytest.mark.slow
@pytest.mark.packages("ckpt", "vlm")
def test_saved_by_two_ranks_before_a_phase_and_gone_on_by_one(pool2: WorkerPool, tmp_path: Path) -> None:
    from test_vlm_data_mixture import run, write_sources

    folder = write_sources(tmp_path / "sources")
    straight = run(folder, 1)
    pool2.run(run, folder, 2, str(tmp_path / "run"), 3)
    found = run(folder, 1, tmp_path / "run")
    assert found["losses"] == pytest.approx(straight["losses"][3:], rel=1e-9)
    assert found["tokens"] == straight["tokens"]
