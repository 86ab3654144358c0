"""What commands do where standard output takes nothing: one line, and a status that tells."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forge_core.commands.main import main

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")


@contextmanager
def printing_to(descriptor: int, monkeypatch: pytest.MonkeyPatch, *, buffered: bool = True) -> Iterator[None]:
    """Standard output is `descriptor`; what is left in its buffer is dropped afterwards."""
    stream = os.fdopen(descriptor, "w", encoding="utf-8")
    stream.reconfigure(write_through=not buffered)
    monkeypatch.setattr(sys, "stdout", stream)
    try:
        yield
    finally:
        monkeypatch.undo()
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), descriptor)
        stream.close()


@needs_full
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("words", [["--version"], ["config", "reference"], ["check", "quickstart"]])
def test_a_full_disk_behind_it(
    words: list[str], buffered: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with printing_to(os.open("/dev/full", os.O_WRONLY), monkeypatch, buffered=buffered):
        status = main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: standard output ")
    assert line.endswith("cannot be written: No space left on device")
    assert status == 1


@needs_full
def test_a_full_disk_behind_a_help_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with printing_to(os.open("/dev/full", os.O_WRONLY), monkeypatch), pytest.raises(SystemExit) as stopped:
        main(["check", "--help"])
    assert stopped.value.code == 1
    assert "standard output cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status"), [(["--version"], 0), (["config", "reference"], 0), (["nope"], 2)]
)
def test_a_reader_that_has_had_enough(
    words: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `| head` does: no fault of ours, and the status is that of the command."""
    reading, writing = os.pipe()
    os.close(reading)
    with printing_to(writing, monkeypatch):
        assert main(words) == status
    assert "Broken" not in capsys.readouterr().err
