"""Images in sizes of their own, in tiles or as clips, in a model cut into stages: as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_core.testing import WorkerPool

pytestmark = pytest.mark.packages("pp", "vlm")

TOLERANCE = 1e-10


def tables_of(kind: str, folder: Path) -> dict[str, Any]:
    from vlmkit import merged, tables
    from vlmsizes import CLIPS, PACKED, TILED, write_moving, write_sizes

    folder.mkdir()
    tiled = merged(TILED, {"vlm": {"gated_cross_attention": {"layers": [1, 3]}}})
    more = {"packed": PACKED, "clips": CLIPS, "tiled": tiled}[kind]
    write = write_moving if kind == "clips" else write_sizes
    train = {"grad_accum_steps": 4, "max_steps": 4, "batch_size": 1, "seq_len": 40}
    found = tables(write(folder), **merged(more, {"train": train, "model": {"n_layers": 4}}))
    found["data"]["holdout"] = 0.3
    found["vlm"]["answer_tokens"] = 3
    found["eval"] = {"steps": 2, "interval": 2, "batch_size": 2}
    return found


def answered(tables: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a run, answers to held-out questions among them."""
    from ppkit import plain

    from forge_core.plugins import Plugins
    from forge_core.testing import run_tiny, tiny_config

    plugins = Plugins()
    run = run_tiny(tiny_config(plugins=plugins, **tables), plugins)
    return {**plain(run), "match": run.metric("eval/exact_match")}


@pytest.mark.parametrize("kind", ["packed", "tiled", pytest.param("clips", marks=pytest.mark.combos)])
def test_two_stages_equal_one_process(kind: str, pool2: WorkerPool, tmp_path: Path) -> None:
    tables = tables_of(kind, tmp_path / "pictures")
    whole = answered(tables)
    assert whole["match"]
    for rank in pool2.run(answered, {**tables, "pp": {"size": 2, "schedule": "1f1b"}}):
        assert rank["losses"] == pytest.approx(whole["losses"], rel=TOLERANCE)
        assert rank["norms"] == pytest.approx(whole["norms"], rel=TOLERANCE)
        if rank["evaluations"]:
            assert rank["evaluations"] == pytest.approx(whole["evaluations"], rel=TOLERANCE)
            assert rank["match"] == whole["match"]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["gather", "ring"])
@pytest.mark.parametrize("kind", ["packed", "tiled"])
def test_context_ranks_inside_stages_equal_one_process(
    kind: str, attention: str, pool4: WorkerPool, tmp_path: Path
) -> None:
    tables = tables_of(kind, tmp_path / "pictures")
    whole = answered(tables)
    layout = {"cp": 2, "dp_shard": 1, "cp_attention": attention}
    many = {**tables, "pp": {"size": 2, "schedule": "1f1b"}, "distributed": layout}
    for rank in pool4.run(answered, many):
        assert rank["losses"] == pytest.approx(whole["losses"], rel=TOLERANCE)
        assert rank["norms"] == pytest.approx(whole["norms"], rel=TOLERANCE)
        if rank["evaluations"]:
            assert rank["evaluations"] == pytest.approx(whole["evaluations"], rel=TOLERANCE)
            assert rank["match"] == whole["match"]
