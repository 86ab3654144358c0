"""What is wrong with samples is counted: over all ranks, whatever the layout, also by a run that goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from vlmdatakit import open_source, rows_of, write_clip
from vlmkit import tables, write_samples

from forge_core.errors import DataError
from forge_core.plugins import Plugins
from forge_core.testing import run_tiny, tiny_config
from forge_core.testing.pool import WorkerPool

NAMES = ("unreadable_images", "unreadable_videos", "missing_images", "samples_cut", "samples_left_out")
RECORDS: list[dict[str, Any]] = [
    {"id": "fine", "image": "0.png", "prompt": "q", "answer": "a"},
    {"id": "missing", "image": "none.png", "prompt": "q", "answer": "a"},
    {"id": "long", "image": "1.png", "prompt": "q", "answer": "a" * 99},
    {"id": "places", "image": "2.png", "prompt": "<image><image>", "answer": "a"},
    {"id": "kind", "image": "2.png", "prompt": 5, "answer": "a"},
    {"id": "broken", "image": "broken.png", "prompt": "q", "answer": "a"},
    {"id": "clip", "video": "broken.mp4", "prompt": "q", "answer": "a"},
    {"id": "last", "image": "3.png", "prompt": "q", "answer": "a"},
]
"""Six samples that are some, two that are none; the sixth ends the file behind them."""
WHOLE = {
    "unreadable_images": 3,  # missing, broken, clip
    "unreadable_videos": 1,
    "missing_images": 1,
    "samples_cut": 1,
    "samples_left_out": 2,
}
LAX = {"vlm/images": {"unreadable": "mask", "malformed": "drop"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = write_samples(tmp_path_factory.mktemp("counted"), RECORDS)
    (found / "broken.png").write_bytes((found / "0.png").read_bytes()[:40])
    (found / "none.png").unlink(missing_ok=True)
    write_clip(found / "whole.mp4")
    (found / "broken.mp4").write_bytes((found / "whole.mp4").read_bytes()[:200])
    return found


def counted(folder: str, place: str, ranks: int, steps: int, **more: Any) -> dict[str, Any]:
    """Each metric of a run over six samples a step, an epoch each, as (step, value)."""
    plugins = Plugins()
    found = tables(Path(folder), train={"max_steps": 2, "batch_size": 6 // ranks, **more.pop("train", {})})
    found["data"] |= {"holdout": 0.0, **LAX}
    config = tiny_config(plugins=plugins, **{**found, "run": {"name": "one"}, **more})
    done = run_tiny(config, plugins, steps=steps, folder=Path(place))
    return {"updates": len(done.losses), **{name: done.metric(f"data/{name}") for name in NAMES}}


def test_every_count_is_a_metric(folder: Path, tmp_path: Path) -> None:
    found = counted(str(folder), str(tmp_path), 1, 2)
    assert found == {"updates": 2, **{name: [value, value] for name, value in WHOLE.items()}}


def test_two_ranks_count_what_one_does(pool2: WorkerPool, folder: Path, tmp_path: Path) -> None:
    expected = counted(str(folder), str(tmp_path / "one"), 1, 2)
    for found in pool2.run(counted, str(folder), str(tmp_path / "two"), 2, 2):
        assert found == expected


@pytest.mark.packages("ckpt", "vlm")
def test_counts_since_the_last_log_go_on_with_a_run(folder: Path, tmp_path: Path) -> None:
    """The first and the third update are logged, and the second is saved."""
    more: dict[str, Any] = {
        "checkpoint": {"interval": 1, "mode": "sync"},
        "metrics": {"log_interval": 3},
        "train": {"max_steps": 3},
    }
    straight = counted(str(folder), str(tmp_path), 1, 3, **more)
    shutil.rmtree(tmp_path / "one" / "checkpoints" / "step_00000003")
    assert counted(str(folder), str(tmp_path), 1, 3, **more) == {**straight, "updates": 1}
    assert {name: straight[name][-1] for name in NAMES} == {name: 2 * value for name, value in WHOLE.items()}


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_packed_rows_count_alike(folder: Path, packing: str) -> None:
    data = {"vlm/images": {**LAX["vlm/images"], "pack": True}, "packing": packing}
    rows = rows_of(open_source(folder, "vlm/images", data=data))
    keys = ("unreadable", "unreadable_videos", "missing", "cut", "left_out")
    assert [sum(int(row[key]) for row in rows) for key in keys] == list(WHOLE.values())


def test_samples_that_are_none_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError, match=r"data\.jsonl:4: places: 2 placeholders <image> for 1 image"):
        open_source(folder, "vlm/images", data={"vlm/images": {"unreadable": "mask"}})
    source = open_source(folder, "vlm/images", data=LAX)
    assert len(source) == 6
    assert "2 of 8 samples left out, as they are no samples" in caplog.text
    assert "data.jsonl:4: places: 2 placeholders" in caplog.text
    assert "data.jsonl:5: kind: " in caplog.text
    assert source.contents().counts["left out as no samples"] == 2
