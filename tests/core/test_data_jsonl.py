"""JSONL and Parquet: encoded once into the cache folder, by one process, whatever reads them."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from sourcekit import byte_ids, python_sources, spec_of, write_jsonl

from forge_core.data.manifest import Manifest
from forge_core.data.options import JsonlOptions, ParquetOptions
from forge_core.data.packing import PackedTokens, RowSource
from forge_core.data.prepare.job import Job, Part
from forge_core.data.prepare.parquet import cut, find
from forge_core.data.prepare.run import prepare
from forge_core.data.prepared import build_jsonl, build_parquet
from forge_core.errors import DataError, ForgeError

TEXTS = ["one", "two ü", "", "three\nlines", "x" * 300]
ENCODE = "forge_core.data.prepared.prepare"
KEPT = [text for text in TEXTS if text]


def open_jsonl(path: Path, cache: Path, field: str = "text", **changes: Any) -> RowSource:
    return build_jsonl(spec_of(path, cache, **changes), JsonlOptions(field=field))


def test_plain_and_compressed_files_give_the_same_tokens(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", ({"id": i, "text": text} for i, text in enumerate(TEXTS)))
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(plain.read_bytes())
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        assert open_jsonl(tmp_path / name, tmp_path / "cache").tokens.tolist() == byte_ids(KEPT)


def test_samples_are_those_of_the_row_of_tokens(tmp_path: Path) -> None:
    texts = python_sources(20)
    path = write_jsonl(tmp_path / "a.jsonl", ({"body": text} for text in texts))
    source = open_jsonl(path, tmp_path / "cache", field="body", seq_len=128)
    plain = PackedTokens(np.array(byte_ids(texts), dtype=np.uint16), end=256, seq_len=128)
    indices = np.arange(len(plain))
    for key, value in plain.batch(indices).items():
        assert np.array_equal(source.batch(indices)[key], value), key


def test_second_opening_encodes_nothing_and_a_changed_file_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ({"text": text} for text in KEPT))
    first = open_jsonl(path, tmp_path / "cache")
    monkeypatch.setattr(ENCODE, lambda *_, **__: pytest.fail("encoded again"))
    again = open_jsonl(path, tmp_path / "cache")
    assert again.fingerprint == first.fingerprint
    monkeypatch.setattr(ENCODE, prepare)
    write_jsonl(path, ({"text": text} for text in reversed(KEPT)))
    changed = open_jsonl(path, tmp_path / "cache")
    assert changed.fingerprint != first.fingerprint
    assert changed.tokens.tolist() == byte_ids(reversed(KEPT))


def test_readers_that_start_together_encode_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ({"text": text} for text in KEPT))
    calls = []

    def counting(*arguments: Any, **keys: Any) -> Manifest:
        calls.append(1)
        return prepare(*arguments, **keys)

    monkeypatch.setattr(ENCODE, counting)
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.append(open_jsonl(path, tmp_path / "cache").tokens.tolist()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [byte_ids(KEPT)] * 4
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n\n{"text": \n', r"a\.jsonl:3: not a line of JSON"),
        ('{"text": "a"}\n[1]\n', r"a\.jsonl:2: not an object of JSON, but list"),
        ('{"text": "a"}\n{"body": "b", "id": 1}\n', r"a\.jsonl:2: no field 'text'; there is: body, id"),
        ('{"text": "a"}\n{"text": 5}\n', r"a\.jsonl:2: the field 'text' is int, not text"),
        ("", r"there is no text in .*a\.jsonl"),
    ],
)
def test_lines_that_cannot_be_read_are_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as error:
        open_jsonl(path, tmp_path / "cache")
    assert "\n" not in error.value.message


@pytest.mark.parametrize(("key", "chats"), [("messages", True), ("body", False)])
def test_a_field_that_is_not_there_says_how_to_name_it(key: str, chats: bool, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({key: []}))
    with pytest.raises(DataError, match=f"no field 'text'; there is: {key}") as error:
        open_jsonl(tmp_path / "a.jsonl", tmp_path / "cache")
    assert "--field" in error.value.hint
    assert ('data.source = "chat"' in error.value.hint) == chats


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n", b"a.png" + bytes(507) + b"\x89PNG\n"])
def test_what_is_no_text_is_named(content: bytes, tmp_path: Path) -> None:
    """A picture, and the start of an archive."""
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tar is no text, but lines of JSON") as error:
        open_jsonl(tmp_path / "a.tar", tmp_path / "cache")
    assert ".jsonl" in error.value.hint


def test_a_compressed_file_that_is_cut_short(tmp_path: Path) -> None:
    content = gzip.compress(json.dumps({"text": "a" * 5000 + "".join(map(chr, range(500)))}).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz is cut short or damaged"):
        open_jsonl(tmp_path / "a.jsonl.gz", tmp_path / "cache")


def test_a_damaged_cache_tells_what_to_remove(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ({"text": text} for text in KEPT))
    open_jsonl(path, tmp_path / "cache")
    (shard,) = tmp_path.glob("cache/tokens/*/tokens-00000.npy")
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(DataError, match=r"tokens-00000\.npy is cut short") as error:
        open_jsonl(path, tmp_path / "cache")
    assert error.value.hint == f"remove {shard.parent}; it is made again from {path}"


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard")])
def test_a_missing_package_is_named(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"something")
    for module in (package, f"{package}.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    build: Any = build_parquet if package == "pyarrow" else build_jsonl
    options = ParquetOptions() if package == "pyarrow" else JsonlOptions()
    with pytest.raises(ForgeError, match=f"needs the package '{package}'") as error:
        build(spec_of(tmp_path / name, tmp_path / "cache"), options)
    assert error.value.hint == f"pip install {package}"


def test_no_path_and_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file or folder .*none\.jsonl"):
        open_jsonl(tmp_path / "none.jsonl", tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no file that ends in \.jsonl"):
        open_jsonl(tmp_path / "empty", tmp_path / "cache")


def write_parquet(path: Path, texts: list[str | None], groups: int = 2) -> Path:
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path, row_group_size=groups)
    return path


def open_parquet(path: Path, cache: Path, field: str = "text") -> RowSource:
    return build_parquet(spec_of(path, cache), ParquetOptions(field=field))


def test_parquet_gives_the_tokens_of_its_column(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_parquet(folder / "b.parquet", [*TEXTS, None])
    write_parquet(folder / "a.parquet", ["first"])
    assert open_parquet(folder, tmp_path / "cache").tokens.tolist() == byte_ids(["first", *KEPT])


def test_parquet_is_cut_between_row_groups(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [f"text {i}" for i in range(9)], groups=2)
    job = Job(kind="parquet")
    units = cut(find([str(path)], job), job, 1)
    assert [unit[0] for unit in units] == [Part(str(path), i, i + 1) for i in range(5)]


def test_parquet_that_cannot_be_read(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", list(TEXTS))
    with pytest.raises(DataError, match=r"a\.parquet: no field 'body'; there is: id, text"):
        open_parquet(path, tmp_path / "cache", field="body")
    with pytest.raises(DataError, match=r"a\.parquet row 0: the field 'id' is int, not text"):
        open_parquet(path, tmp_path / "cache", field="id")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet is no Parquet file, or cut short"):
        open_parquet(path, tmp_path / "cache")
