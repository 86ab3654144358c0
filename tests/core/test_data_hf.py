"""Hugging Face data sets: on disk and as streams, which give the same samples in the same place."""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sourcekit import byte_ids, python_sources, spec_of, write_jsonl

from forge_core.data.hf import StreamedText, build
from forge_core.data.hub import load_rows
from forge_core.data.options import HfOptions
from forge_core.data.packing import PackedTokens, RowSource
from forge_core.data.source import SequentialSource
from forge_core.errors import DataError

datasets = pytest.importorskip("datasets")
STREAM = HfOptions(streaming=True)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return python_sources(30, most=6000)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def file(texts: list[str], tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", ({"text": text} for text in texts))


def open_rows(path: Path | str, folder: Path, options: HfOptions | None = None) -> RowSource:
    source = build(spec_of(path, folder / "cache"), options or HfOptions())
    assert isinstance(source, RowSource)
    return source


def open_stream(path: Path | str, folder: Path, options: HfOptions = STREAM, **changes: Any) -> StreamedText:
    source = build(spec_of(path, folder / "cache", **changes), options)
    assert isinstance(source, StreamedText)
    assert isinstance(source, SequentialSource)
    return source


def test_saved_data_set_and_files(texts: list[str], file: Path, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"body": [*texts, None, ""]})
    rows.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": rows, "dev": rows.select([0])}).save_to_disk(str(tmp_path / "splits"))
    body = HfOptions(field="body")
    assert open_rows(tmp_path / "saved", tmp_path, body).tokens.tolist() == byte_ids(texts)
    assert open_rows(tmp_path / "splits", tmp_path, body).tokens.tolist() == byte_ids(texts)
    dev = HfOptions(field="body", split="dev")
    assert open_rows(tmp_path / "splits", tmp_path, dev).tokens.tolist() == byte_ids(texts[:1])
    assert open_rows(file, tmp_path).tokens.tolist() == byte_ids(texts)
    with pytest.raises(DataError, match="has no split 'test'"):
        open_rows(tmp_path / "splits", tmp_path, HfOptions(split="test"))
    with pytest.raises(DataError, match="no field 'text'; there is: body"):
        open_rows(tmp_path / "saved", tmp_path)


def test_stream_gives_the_samples_of_the_row(texts: list[str], file: Path, tmp_path: Path) -> None:
    row = PackedTokens(np.array(byte_ids(texts), dtype=np.uint16), end=256, seq_len=64)
    samples = list(open_stream(file, tmp_path).once())
    whole = (len(byte_ids(texts)) - 1) // 64
    assert len(samples) == whole
    for index, sample in enumerate(samples):
        for key, value in row[index].items():
            assert np.array_equal(sample[key], value), (index, key)


def test_stream_goes_on_where_it_stopped_and_joins_epochs(
    texts: list[str], file: Path, tmp_path: Path
) -> None:
    stream = open_stream(file, tmp_path)
    epoch = (len(byte_ids(texts)) - 1) // 64
    straight = list(islice(stream.at(0), epoch + 20))
    for position in (0, 1, epoch - 1, epoch, epoch + 7):
        again = list(islice(open_stream(file, tmp_path).at(position), 5))
        for ours, theirs in zip(again, straight[position : position + 5], strict=True):
            assert {k: v.tolist() for k, v in ours.items()} == {k: v.tolist() for k, v in theirs.items()}
    # two epochs end to end are one row
    twice = PackedTokens(np.array(byte_ids(texts) * 2, dtype=np.uint16), end=256, seq_len=64)
    for index, sample in enumerate(straight):
        assert np.array_equal(sample["tokens"], twice[index]["tokens"])
        assert np.array_equal(sample["documents"], twice[index]["documents"])


def test_a_shuffled_stream_is_repeatable_and_epochs_differ(
    texts: list[str], file: Path, tmp_path: Path
) -> None:
    options = HfOptions(streaming=True, shuffle_buffer=16)
    first = np.concatenate([s["tokens"] for s in open_stream(file, tmp_path, options).once()])
    again = np.concatenate([s["tokens"] for s in open_stream(file, tmp_path, options).once()])
    assert np.array_equal(first, again)
    other = np.concatenate([s["tokens"] for s in open_stream(file, tmp_path, options, seed=1).once()])
    plain = np.concatenate([s["tokens"] for s in open_stream(file, tmp_path).once()])
    assert not np.array_equal(first, other[: len(first)])
    assert not np.array_equal(first, plain[: len(first)])
    many = 2 * len(first) // 64 + 10
    both = np.concatenate([s["tokens"] for s in islice(open_stream(file, tmp_path, options).at(0), many)])
    documents = [bytes(d[:-1].tolist()) for d in np.split(both, np.flatnonzero(both == 256) + 1)]
    epochs = documents[: len(texts)], documents[len(texts) : 2 * len(texts)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(text.encode() for text in texts)


def test_fingerprint_of_a_stream(file: Path, tmp_path: Path) -> None:
    first = open_stream(file, tmp_path).fingerprint
    assert open_stream(file, tmp_path).fingerprint == first
    assert open_stream(file, tmp_path, seed=1).fingerprint != first
    assert open_stream(file, tmp_path, HfOptions(streaming=True, shuffle_buffer=2)).fingerprint != first
    file.write_text(file.read_text().replace("import", "export"))
    assert open_stream(file, tmp_path).fingerprint != first


def test_what_a_stream_cannot_do_is_refused_with_the_reason(file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing can be held out of a stream"):
        open_stream(file, tmp_path, split="holdout")
    with pytest.raises(DataError, match="best_fit needs the length of every document"):
        open_stream(file, tmp_path, packing="best_fit")
    assert open_stream(file, tmp_path).unrepeatable == ""
    assert "names no commit" in open_stream("somebody/something", tmp_path).unrepeatable
    named = HfOptions(streaming=True, revision="a" * 40)
    assert open_stream("somebody/something", tmp_path, named).unrepeatable == ""
    with pytest.raises(DataError, match="there is no text in"):
        next(open_stream(write_jsonl(tmp_path / "b.jsonl", [{"text": ""}]), tmp_path).at(0))
    with pytest.raises(DataError, match="document 0: no field 'body'; there is: text"):
        next(open_stream(file, tmp_path, HfOptions(streaming=True, field="body")).at(0))


def test_a_data_set_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda path, *_, **__: asked.append(path))
    for path in (tmp_path / "none", "./none", "../none.parquet", "some/folder/none", "~/no such folder"):
        with pytest.raises(DataError) as error:
            open_rows(path, tmp_path)
        assert error.value.message == f"there is no file or folder {path}"
    assert not asked
    for path in ("owner/name", "name", "https://here.example/a/b.parquet", "some/folder/*.parquet"):
        load_rows(path, {}, str(tmp_path))
    assert asked == ["owner/name", "name", "https://here.example/a/b.parquet", "some/folder/*.parquet"]


def test_lines_of_the_library_are_no_part_of_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("huggingface_hub.utils._http")
    level = logger.level

    def fail(*_: object, **__: object) -> None:
        logger.warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match="the data set owner/name cannot be loaded: nobody answers"):
        load_rows("owner/name", {}, str(tmp_path))
    assert "Retrying" not in "".join(capfd.readouterr())
    assert logger.level == level
