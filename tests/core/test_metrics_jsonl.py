"""metrics.jsonl: whole lines only, cut back on resume, one clear error when the disk is full."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forge_core.errors import ForgeError
from forge_core.metrics.jsonl import JsonlWriter, cut_back, read_records


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, steps: range, scale: float = 1.0) -> None:
    writer = JsonlWriter(path)
    for step in steps:
        writer.write(step, {"train/loss": scale * step, "tokens": step})
    writer.close()


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_records(path)]


def test_lines_are_json_and_there_at_once(path: Path) -> None:
    writer = JsonlWriter(path)
    writer.write(1, {"train/loss": 2.5, "tokens": 12})
    assert path.read_text() == '{"step": 1, "train/loss": 2.5, "tokens": 12}\n'
    writer.write(1, {"eval/loss": 1e-30})
    assert list(read_records(path)) == [
        {"step": 1, "train/loss": 2.5, "tokens": 12},
        {"step": 1, "eval/loss": 1e-30},
    ]
    writer.close()
    writer.close()


def test_what_is_not_finite_is_null_and_the_line_valid_json(path: Path) -> None:
    writer = JsonlWriter(path)
    writer.write(3, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1})
    writer.close()

    def refuse(word: str) -> None:
        raise AssertionError(word)

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record == {"step": 3, "a": None, "b": None, "c": None, "d": 0.1}


def test_goes_on_after_what_is_there(path: Path) -> None:
    write(path, range(1, 4))
    write(path, range(4, 6))
    assert steps(path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("torn", ['{"step": 4, "tr', '{"step": 4}', "x" * 200_000])
def test_a_torn_last_line_is_dropped_on_opening(path: Path, torn: str) -> None:
    write(path, range(1, 4))
    with path.open("a") as file:
        file.write(torn)
    assert steps(path) == [1, 2, 3]
    write(path, range(4, 5))
    assert steps(path) == [1, 2, 3, 4]
    assert path.read_text().count("\n") == 4


def test_only_a_torn_line(path: Path) -> None:
    path.write_text('{"step": 1, "a"')
    write(path, range(1, 2))
    assert steps(path) == [1]


def test_cut_back_to_the_step_resumed_from(path: Path) -> None:
    write(path, range(1, 10))
    before = path.read_text().splitlines()
    with path.open("a") as file:
        file.write('{"step": 10, "train/')
    assert cut_back(path, 6) == 3
    assert path.read_text().splitlines() == before[:6]
    assert list(path.parent.iterdir()) == [path]
    write(path, range(7, 13), scale=10.0)
    found = {record["step"]: record["train/loss"] for record in read_records(path)}
    assert found == {**{s: float(s) for s in range(1, 7)}, **{s: 10.0 * s for s in range(7, 13)}}


def test_cut_back_looks_at_steps_not_at_order(path: Path) -> None:
    for first in (1, 3):
        write(path, range(first, 6))
    assert cut_back(path, 3) == 4
    assert steps(path) == [1, 2, 3, 3]
    assert cut_back(path, 0) == 4
    assert path.read_bytes() == b""


def test_cut_back_without_a_file_or_with_foreign_lines(path: Path) -> None:
    assert cut_back(path, 5) == 0
    assert not path.exists()
    path.write_bytes(b'\xff\xfe\n[1]\n{"a": 1}\n\0\0\0\0\n{"step": 2}\n')
    assert cut_back(path, 5) == 0
    assert path.read_text() == '{"step": 2}\n'


FULL = """
import resource, sys
from pathlib import Path
from forge_core.errors import ForgeError
from forge_core.metrics.jsonl import JsonlWriter, cut_back
path = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    if sys.argv[2] == "write":
        writer = JsonlWriter(path)
        for step in range(1, 1000):
            writer.write(step, {"train/loss": step / 7})
    else:
        cut_back(path, 10**9)
except ForgeError as error:
    print(error.message)
    sys.exit(error.exit_status)
"""


def run_full(path: Path, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FULL, str(path), what], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_full_disk_leaves_whole_lines_and_says_so(path: Path) -> None:
    done = run_full(path, "write")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == f"cannot write {path}: File too large\n"
    content = path.read_bytes()
    assert 900 < len(content) <= 1000
    assert content.endswith(b"}\n")
    assert steps(path) == list(range(1, content.count(b"\n") + 1))


def test_a_full_disk_while_cutting_back_changes_nothing(path: Path) -> None:
    write(path, range(1, 200))
    before = path.read_bytes()
    assert len(before) > 1000
    done = run_full(path, "cut")
    assert (done.returncode, done.stdout) == (1, f"cannot write {path}: File too large\n")
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_device_without_space(path: Path) -> None:
    path.symlink_to("/dev/full")
    writer = JsonlWriter(path)
    with pytest.raises(ForgeError, match=r"cannot write .*metrics.jsonl: No space left on device"):
        writer.write(1, {"a": 1.0})
    writer.close()


def test_writing_goes_on_when_there_is_space_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JsonlWriter(path)
    writer.write(1, {"a": 1.0})
    original = os.write

    def half(file: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return original(file, data[: len(data) - 5])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(ForgeError, match="No space left"):
            writer.write(2, {"a": 2.0})
    assert steps(path) == [1]
    writer.write(3, {"a": 3.0})
    assert path.read_text() == '{"step": 1, "a": 1.0}\n{"step": 3, "a": 3.0}\n'


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"cannot write .*nowhere/metrics.jsonl: No such file or directory"):
        JsonlWriter(tmp_path / "nowhere" / "metrics.jsonl")
    with pytest.raises(ForgeError, match="Is a directory"):
        JsonlWriter(tmp_path)
    with pytest.raises(ForgeError, match="cannot read"):
        list(read_records(tmp_path / "missing.jsonl"))
