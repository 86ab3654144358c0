"""Preparing data: the same for any number of processes and interruptions, verified, and read back."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from sourcekit import byte_ids, python_sources, spec_of, write_jsonl
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from forge_core.commands.main import main
from forge_core.data.manifest import read_manifest
from forge_core.data.options import TokensOptions
from forge_core.data.prepare.encode import encode_unit
from forge_core.data.prepare.job import Job, Part, gather
from forge_core.data.prepare.readers import kind_of
from forge_core.data.prepare.run import prepare
from forge_core.data.prepare.verify import verify
from forge_core.data.token_corpus import open_corpus
from forge_core.data.tokenizer import ByteTokenizer
from forge_core.data.tokens import build
from forge_core.errors import DataError, WriteError

JSONL = Job(kind="jsonl")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return python_sources(60)


@pytest.fixture
def source(texts: list[str], tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", ({"text": text} for text in texts))


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}


def tokens_of(folder: Path) -> list[int]:
    return [int(t) for shard in open_corpus(str(folder)).shards for t in shard.tokens]


def test_tokens_are_those_of_the_documents_in_order(texts: list[str], source: Path, tmp_path: Path) -> None:
    manifest = prepare([str(source)], JSONL, tmp_path / "out", shard_size=50_000)
    assert tokens_of(tmp_path / "out") == byte_ids(texts)
    corpus = open_corpus(str(tmp_path / "out"))
    assert len(corpus.shards) > 3
    lengths = []
    for shard in corpus.shards:
        assert shard.documents is not None
        lengths += np.diff(shard.documents).tolist()
    assert lengths == [len(text.encode()) + 1 for text in texts]
    assert (manifest.tokens, manifest.documents) == (len(byte_ids(texts)), len(texts))
    assert read_manifest(tmp_path / "out") == verify(tmp_path / "out") == manifest


@pytest.mark.slow
def test_files_do_not_depend_on_the_number_of_processes(source: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        prepare([str(source)], JSONL, tmp_path / str(workers), shard_size=50_000, workers=workers)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "3")


@pytest.mark.slow
def test_processes_load_a_tokenizer_of_their_own_and_tell_errors(tmp_path: Path) -> None:
    words = ["[UNK]", "</s>", *(f"w{i}" for i in range(200))]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    rows = [{"text": " ".join(f"w{(i * j) % 200}" for j in range(i))} for i in range(1, 100)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    job = Job(kind="jsonl", tokenizer=str(tmp_path / "tokenizer.json"))
    prepare([str(source)], job, tmp_path / "out", shard_size=5000, workers=2)
    ids = [i for row in rows for i in (*(int(word[1:]) + 2 for word in row["text"].split()), 1)]
    assert tokens_of(tmp_path / "out") == ids
    source.write_text(source.read_text() + "{broken\n")
    with pytest.raises(DataError, match=r"in\.jsonl:100: not a line of JSON"):
        prepare([str(source)], job, tmp_path / "other", shard_size=5000, workers=2)


@pytest.mark.parametrize("size", [1, 37, 1000, 10**9])
def test_lines_are_read_once_wherever_the_file_is_cut(size: int, tmp_path: Path) -> None:
    rows = [{"text": "ab" * (i % 7) + "é\n"} for i in range(12)]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    path.write_text("\n" + path.read_text().rstrip("\n"))  # an empty line, and none at the end
    prepare([str(path)], JSONL, tmp_path / "out", shard_size=size)
    assert tokens_of(tmp_path / "out") == byte_ids(row["text"] for row in rows)


def test_an_interrupted_preparation_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare([str(source)], JSONL, tmp_path / "straight", shard_size=50_000)
    out = tmp_path / "out"
    made: list[int] = []

    def counting(unit: Any, job: Job) -> Any:
        made.append(unit[0].start)
        if len(made) == 3:
            raise KeyboardInterrupt
        return encode_unit(unit, job)

    monkeypatch.setattr("forge_core.data.prepare.shard.encode_unit", counting)
    with pytest.raises(KeyboardInterrupt):
        prepare([str(source)], JSONL, out, shard_size=50_000)
    with pytest.raises(DataError, match="is a preparation that was not finished"):
        open_corpus(str(out))
    # one of the two finished shards is damaged: it is made again, the other is kept
    damaged = out / "tokens-00001.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    (out / ".tokens-00009.npy.1.tmp").write_bytes(b"left over")
    done = []
    prepare([str(source)], JSONL, out, shard_size=50_000, progress=lambda n, _, __: done.append(n))
    assert done[0] == 1
    assert files_of(out) == files_of(tmp_path / "straight")
    assert not list(out.glob(".*.tmp"))
    # a further call finds everything done
    made.clear()
    prepare([str(source)], JSONL, out, shard_size=50_000)
    assert made == []


@pytest.mark.slow
def test_a_killed_preparation_goes_on(source: Path, tmp_path: Path) -> None:
    arguments = [str(source), "--shard-size", "3K", "--workers", "2"]
    assert main(["data", "prepare", *arguments, "--out", str(tmp_path / "straight"), "--json"]) == 0
    out = tmp_path / "out"
    command = [sys.executable, "-m", "forge_core", "data", "prepare", *arguments, "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(out.glob("tokens-*.json")) and time.monotonic() < deadline:
        time.sleep(0.001)
    children = [
        int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]
    process.kill()
    process.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert not (out / "manifest.json").exists()
    assert subprocess.run(command, capture_output=True, timeout=100).returncode == 0
    assert files_of(out) == files_of(tmp_path / "straight")


def test_a_folder_with_something_else_is_left_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([str(source)], JSONL, out)
    with pytest.raises(DataError, match="holds another preparation: other shard_size"):
        prepare([str(source)], JSONL, out, shard_size=1000)
    write_jsonl(source, [{"text": "other"}])
    with pytest.raises(DataError, match="holds another preparation: other inputs"):
        prepare([str(source)], JSONL, out)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match=r"mine is not empty: it holds thesis\.txt"):
        prepare([str(source)], JSONL, mine)


def test_verify_names_what_is_wrong(source: Path, tmp_path: Path) -> None:
    prepare([str(source)], JSONL, tmp_path / "out", shard_size=50_000)
    shard = tmp_path / "out" / "tokens-00001.npy"
    content = shard.read_bytes()
    shard.write_bytes(content[:-2] + b"\x01\x00")
    with pytest.raises(DataError, match=r"tokens-00001\.npy is not what was written"):
        verify(tmp_path / "out")
    shard.write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"tokens-00001\.npy is cut short"):
        open_corpus(str(tmp_path / "out"))
    shard.unlink()
    with pytest.raises(DataError, match=r"tokens-00001\.npy is missing"):
        verify(tmp_path / "out")


def test_text_is_prepared_like_the_source_reads_it(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(f"text {i}\n")
    (tmp_path / "other.md").write_text("not taken")
    out = tmp_path / "tokens"
    job = Job(kind="text", patterns=("*.txt",))
    prepare([str(tmp_path)], job, out, shard_size=8)
    ids = np.array(tokens_of(out))
    documents = sorted(
        bytes(d[d != 256].tolist()) for d in np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1]
    )
    assert documents == [f"text {i}\n".encode() for i in range(5)]
    assert len(open_corpus(str(out)).shards) == 5


def test_units_are_a_function_of_the_sizes() -> None:
    parts = [(Part(str(i)), size) for i, size in enumerate([5, 5, 20, 1, 1, 9])]
    names = [[part.path for part in unit] for unit in gather(parts, 10)]
    assert names == [["0", "1"], ["2"], ["3", "4"], ["5"]]


def test_kinds_are_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jsonl").touch()
    (tmp_path / "a" / "y.jsonl.gz").touch()
    assert kind_of(str(tmp_path / "a")) == "jsonl"
    (tmp_path / "a" / "z.py").touch()
    assert kind_of(str(tmp_path / "a")) == "text"
    assert [kind_of(name) for name in ("x.parquet", "x.json", "x.txt", "x")] == [
        "parquet",
        "jsonl",
        "text",
        "text",
    ]


def test_command_tells_the_way_on(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["data", "prepare", str(source), "--out", out, "--verify"]) == 0
    printed = capsys.readouterr()
    assert f'data.source = "tokens", data.path = "{out}"' in printed.out
    assert "verified" in printed.out
    assert "shards" in printed.err
    assert main(["data", "prepare", "--out", out, "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs a SOURCE"),
        (["missing.jsonl"], "there is no file or folder missing.jsonl"),
        (["stdlib", "--optimizer.lr=1"], "takes no --optimizer.lr=1"),
        (["a.jsonl", "b.parquet"], "of several kinds: a.jsonl is jsonl, b.parquet is parquet"),
        (["stdlib", "--chat-template", "plain"], "needs rows with messages"),
        (["stdlib", "--tokenizer", "none.json"], "there is no file none.json"),
    ],
)
def test_wrong_commands_end_with_status_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", "prepare", *arguments, "--out", "out"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_an_interruption_ends_quietly_and_can_be_taken_up(source: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "forge_core",
        "data",
        "prepare",
        str(source),
        "--out",
        str(tmp_path / "out"),
    ]
    command += ["--workers", "2", "--shard-size", "1K"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out/tokens-*.json")) and time.monotonic() < deadline:
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.splitlines()[-1] == "interrupted; the same command goes on from here"
    assert "Traceback" not in told
    assert subprocess.run(command, capture_output=True, timeout=100).returncode == 0
    assert verify(tmp_path / "out").documents == 60


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match="cannot make the folder"):
        prepare([str(source)], JSONL, tmp_path / "out")


def test_a_full_disk_is_told_and_leaves_no_half_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    prepare([str(source)], JSONL, tmp_path / "other")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot write .*plan\.json: No space left on device"):
        prepare([str(source)], JSONL, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_the_command_ends_with_status_1_on_a_full_disk(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No word of the command was wrong, as those of status 2 are. The disk fills up at the first shard."""
    calls = []

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert main(["data", "prepare", str(source), "--out", str(tmp_path / "out")]) == 1
    (line, hint) = [line for line in capsys.readouterr().err.splitlines() if "rror" in line or "hint" in line]
    assert re.fullmatch(r"error: cannot write .*tokens-00000\.npy: No space left on device", line)
    assert "free some space" in hint
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", "plan.json"]


def test_what_a_process_of_its_own_says_of_a_full_disk_arrives() -> None:
    """Status and hint are those of the error that it met."""
    with ProcessPoolExecutor(1) as pool:
        error = pool.submit(WriteError, "cannot write", "free some space").result(timeout=60)
    assert (type(error), error.exit_status, error.hint) == (WriteError, 1, "free some space")


def test_no_text_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": ""}, {"text": None}])
    with pytest.raises(DataError, match="there is no text in"):
        prepare([str(path)], JSONL, tmp_path / "out")


def test_prepared_tokens_belong_to_their_tokenizer(source: Path, tmp_path: Path) -> None:
    class Other(ByteTokenizer):
        name = "other"

    prepare([str(source)], JSONL, tmp_path / "out")
    spec = attrs.evolve(spec_of(tmp_path / "out", tmp_path), tokenizer=Other())
    with pytest.raises(
        DataError, match=r"was prepared with the tokenizer bytes, data\.tokenizer is another: other"
    ):
        build(spec, TokensOptions())
    assert len(build(spec, TokensOptions(check_tokenizer=False)))


def test_preparing_imports_no_torch(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from forge_core.commands.main import main; "
        f"main(['data', 'prepare', {str(source)!r}, '--out', {str(tmp_path / 'out')!r}, '--verify']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
