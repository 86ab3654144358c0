"""Every source knows what evaluations ask: the same numbers from lines, tar shards, data sets and streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_vlm_evaluation import ALL, asked_records, evaluated, on_this_rank
from vlmdatakit import open_source, write_tar
from vlmkit import tables, write_samples

from forge_core.testing.pool import WorkerPool

datasets = pytest.importorskip("datasets")
COUNT = 21


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples as lines, in two tar shards, and in two Parquet files of a data set."""
    found = write_samples(tmp_path_factory.mktemp("sources"), asked_records(COUNT))
    members: list[tuple[str, bytes]] = []
    columns: dict[str, list[Any]] = {
        name: [] for name in ("images", "prompt", "answer", "answers", "choices")
    }
    for number, record in enumerate(asked_records(COUNT)):
        names = record.get("images", [record["image"]] if "image" in record else [])
        content = [(found / name).read_bytes() for name in names]
        members += [(f"{number:03}.{place}.png", each) for place, each in enumerate(content)]
        text = {key: value for key, value in record.items() if key not in ("image", "images")}
        members.append((f"{number:03}.json", json.dumps(text).encode()))
        columns["images"].append([{"bytes": each, "path": None} for each in content])
        answer = record.get("answer")
        choices = record.get("choices")
        columns["answer"].append(choices[answer] if isinstance(answer, int) and choices else answer)
        for key in ("prompt", "answers", "choices"):
            columns[key].append(record.get(key))
    (found / "shards").mkdir()
    middle = next(at for at, (name, _) in enumerate(members) if name.startswith("010"))
    write_tar(found / "shards" / "0.tar", members[:middle])
    write_tar(found / "shards" / "1.tar", members[middle:])
    whole = datasets.Dataset.from_dict(columns)
    (found / "parquet").mkdir()
    whole.select(range(10)).to_parquet(str(found / "parquet" / "0.parquet"))
    whole.select(range(10, COUNT)).to_parquet(str(found / "parquet" / "1.parquet"))
    whole.save_to_disk(str(found / "saved"))
    return found


OPTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "shards": ("vlm/webdataset", "shards", {"need_images": False}),
    "parquet": ("vlm/hf", "parquet", {}),
    "saved": ("vlm/hf", "saved", {}),
    "stream of parquet": ("vlm/hf", "parquet", {"streaming": True}),
    "stream of a saved one": ("vlm/hf", "saved", {"streaming": True}),
}


def asked_of(folder: Path, how: str) -> dict[str, Any]:
    """Tables of a session that evaluates on one of the sources."""
    found = evaluated(folder, vlm={"metrics": [*ALL, "mine/counted"]})
    if how != "lines":
        source, path, options = OPTIONS[how]
        found["eval"]["sets"] = [
            {"name": "all", "source": source, "path": str(folder / path), source: options}
        ]
    found["eval"]["batch_size"] = 4
    return {**tables(folder, **found), "mine": {}}


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, float]:
    found = on_this_rank(asked_of(folder, "lines"))
    assert found["eval/mine/counted"] == 16
    return found


@pytest.mark.parametrize(
    "how", [pytest.param(each, marks=pytest.mark.slow if "saved" in each else ()) for each in OPTIONS]
)
def test_all_metrics_are_those_of_lines(folder: Path, expected: dict[str, float], how: str) -> None:
    found = on_this_rank(asked_of(folder, how))
    for name in [*ALL, "mine/counted"]:
        assert found[f"eval/{name}"] == pytest.approx(expected[f"eval/{name}"], rel=1e-12), name


@pytest.mark.parametrize("how", [pytest.param("shards", marks=pytest.mark.slow), "stream of parquet"])
def test_two_ranks_measure_the_same(
    pool2: WorkerPool, folder: Path, expected: dict[str, float], how: str
) -> None:
    """21 samples in windows of eight: one rank has a batch of its own that counts for nothing."""
    for found in pool2.run(on_this_rank, asked_of(folder, how)):
        for name in [*ALL, "mine/counted"]:
            assert found[f"eval/{name}"] == pytest.approx(expected[f"eval/{name}"], rel=1e-9), name


@pytest.mark.parametrize("pack", [False, True])
def test_a_stream_knows_the_questions_that_numbers_know(folder: Path, pack: bool) -> None:
    options = {"streaming": True, "pack": pack}
    stream = open_source(folder / "saved", "vlm/hf", data={"vlm/hf": options})
    numbers = open_source(folder / "saved", "vlm/hf", data={"vlm/hf": {"pack": pack}})
    for _ in range(2):  # a second evaluation starts anew
        rows = list(stream.once())
        assert len(rows) == len(numbers)
        assert [stream.question(n) for n in range(len(rows))] == [
            numbers.question(n) for n in range(len(rows))
        ]
        assert stream.most_choices == numbers.most_choices == 3
    assert stream.question(len(rows)) is None
