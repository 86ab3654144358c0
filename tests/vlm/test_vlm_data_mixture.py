"""Images, videos and text in one mixture with phases: one position, on any number of ranks and workers."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vlmdatakit import configured, digits, encoded, stream_of, write_clip, write_tar
from vlmkit import mixed_records, tables, write_samples

from forge_core.plugins import Plugins
from forge_core.testing import run_tiny, tiny_config
from forge_core.testing.pool import WorkerPool

av = pytest.importorskip("av")
NAMES = ["pictures", "clips", "text", "shards"]
PHASES = [{"start_step": 5, "weights": {"clips": 1.0, "text": 1.0}}]
PLAN = [(2, 2, 2, 3), (1, 4, 2, 3), (4, 2, 1, 4)]
"""Ranks, batch size, micro-batches, updates; 8 samples an update; the phase begins inside the second."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sources(tmp_path_factory.mktemp("mixture"))


def write_sources(root: Path) -> Path:
    """Four sources."""
    for name in NAMES:
        (root / name).mkdir(parents=True)
    write_samples(root / "pictures", mixed_records(20))
    write_samples(root / "clips", [{"video": f"{n % 3}.mp4", "answer": f"c{n}"} for n in range(10)])
    for number in range(3):
        write_clip(root / "clips" / f"{number}.mp4", 10 + number)
    (root / "text" / "a.txt").write_text("the quick brown fox " * 30, encoding="utf-8")
    pictures, _ = digits()
    members = [(f"{n}.{k}", v) for n in range(9) for k, v in (("png", encoded(pictures[n])), ("txt", b"s"))]
    write_tar(root / "shards" / "a.tar", members)
    return root


def data_of(folder: Path | str, workers: int = 0) -> dict[str, Any]:
    folder = Path(folder)
    sources = dict(zip(NAMES, ["vlm/images", "vlm/images", "text", "vlm/webdataset"], strict=True))
    mix = [
        {"name": name, "source": source, "path": str(folder / name), "weight": 1.0 + (name == "pictures")}
        for name, source in sources.items()
    ]
    return {
        "mix": mix,
        "phases": PHASES,
        "num_workers": workers,
        "cache_dir": str(folder / "cache"),
        "holdout": 0.0,
    }


TABLES: dict[str, Any] = {
    "vlm": {"max_images": 3, "video": {"uniform": {"max_frames": 3, "min_frames": 3}}},
    "model": {"vocab_size": 257},
}


def rows_of(parts: list[list[dict[str, torch.Tensor]]]) -> list[dict[str, Any]]:
    """Rows of a step in their global order."""
    return [
        {key: value[row].numpy() for key, value in rank[m].items()}
        for m in range(len(parts[0]))
        for rank in parts
        for row in range(len(rank[m]["tokens"]))
    ]


def assert_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            assert np.array_equal(value, other[key]), key


def straight(folder: Path, updates: int, workers: int = 0) -> list[dict[str, Any]]:
    config, component = configured(data_of(folder, workers), **TABLES)
    with closing(stream_of(config, component, batch_size=4, window=8)) as stream:
        return [row for _ in range(updates) for row in rows_of([stream.take(2)])]


def test_a_position_is_exact_across_a_phase_and_on_other_ranks(folder: Path) -> None:
    expected = straight(folder, 10)
    config, component = configured(data_of(folder), **TABLES)
    seen: list[dict[str, Any]] = []
    state: Any = None
    for ranks, batch_size, count, updates in PLAN:
        streams = [
            stream_of(config, component, rank=rank, ranks=ranks, batch_size=batch_size, window=8)
            for rank in range(ranks)
        ]
        for stream in streams:
            if state is not None:
                stream.load_state_dict(state)
        for _ in range(updates):
            seen += rows_of([stream.take(count) for stream in streams])
        states = [stream.state_dict() for stream in streams]
        assert all(other == states[0] for other in states)
        state = states[0]
        for stream in streams:
            stream.close()
    assert_same(seen, expected)
    drawn = {name: kept["drawn"] for name, kept in state["sources"].items()}
    counted = Counter(NAMES[int(row["sources"])] for row in seen)
    assert drawn == dict(counted)
    later = {NAMES[int(row["sources"])] for row in seen[32:]}  # from update 5 on
    assert later == {"clips", "text"}
    assert {NAMES[int(row["sources"])] for row in seen[:32]} == set(NAMES)
    assert all(int(row["present"].sum()) == 3 for row in seen if row["sources"] == 1)
    assert not any(row["present"].any() for row in seen if row["sources"] == 2)


def test_processes_that_read_keep_the_order(folder: Path) -> None:
    assert_same(straight(folder, 6, workers=2), straight(folder, 6))


def run(
    folder: Path | str, data_ranks: int, place: Path | str | None = None, steps: int = 8
) -> dict[str, Any]:
    """Losses and the supervised tokens of each source; with a place, saved there and gone on from."""
    found = tables("", **TABLES)
    found["data"] = {"tokenizer": "bytes", **data_of(folder)}
    found["train"] |= {"batch_size": 8 // data_ranks, "max_steps": 8}
    found["scheduler"] = {"name": "constant"}
    if place is not None:
        found |= {"run": {"name": "one"}, "checkpoint": {"interval": 1, "mode": "sync"}}
    found["vlm"]["encoder"]["frozen"] = False
    plugins = Plugins()
    where = None if place is None else Path(place)
    done = run_tiny(tiny_config(plugins=plugins, **found), plugins, steps=steps, folder=where)
    tokens = {name: done.metric(f"data/{name}/tokens")[-1] for name in NAMES}
    return {"losses": done.losses, "tokens": tokens, "images": done.metric("data/images")}


def test_tokens_of_each_source_are_counted(folder: Path) -> None:
    expected: Counter[str] = Counter()
    config, component = configured(data_of(folder), **TABLES, train={"seq_len": 32})
    with closing(stream_of(config, component, batch_size=8, window=8)) as stream:
        for _ in range(8):
            for row in rows_of([stream.take(1)]):
                expected[NAMES[int(row["sources"])]] += int((row["targets"] >= 0).sum())
    found = run(folder, 1)
    assert found["tokens"] == dict(expected)
    assert len(set(found["images"])) > 1


def test_two_ranks_train_on_a_mixture_as_one_does(pool2: WorkerPool, folder: Path) -> None:
    expected = run(folder, 1)
    for found in pool2.run(run, folder, 2):
        assert found["tokens"] == expected["tokens"]
        assert found["images"] == expected["images"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)


def test_a_stream_of_pictures_mixes_with_text(folder: Path, tmp_path: Path) -> None:
    """Its rows lack nothing that those of text have, and go on at a position."""
    datasets = pytest.importorskip("datasets")
    pictures, labels = digits()
    columns = {"image": pictures[:12], "answer": [str(label) for label in labels[:12]]}
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "saved"))
    data = data_of(folder)
    streamed = {"name": "streamed", "source": "vlm/hf", "path": str(tmp_path / "saved"), "weight": 1.0}
    data["mix"] = [{**streamed, "vlm/hf": {"streaming": True}}, data["mix"][2]]
    del data["phases"]
    config, component = configured(data, **TABLES)
    with closing(stream_of(config, component, batch_size=4, window=4)) as stream:
        for _ in range(3):
            stream.take(1)
        state = stream.state_dict()
        expected = [row for _ in range(4) for row in rows_of([stream.take(1)])]
    with closing(stream_of(config, component, batch_size=2, window=4)) as stream:
        stream.load_state_dict(state)
        assert_same([row for _ in range(4) for row in rows_of([stream.take(2)])], expected)
    assert {bool(row["present"].any()) for row in expected} == {True, False}
