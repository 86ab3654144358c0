"""Progress: a bar on a terminal, lines elsewhere, and never the reason that a run ends."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest

from forge_core.metrics.progress import (
    BarProgress,
    PlainProgress,
    SilentProgress,
    describe,
    open_progress,
)

METRICS = {
    "train/loss": 2.34512,
    "train/grad_norm": 0.8123,
    "train/lr": 3e-4,
    "train/tokens_per_sec": 12345.6,
    "train/mfu": 0.41,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines() -> None:
    out = io.StringIO()
    progress = open_progress("auto", 1000, out)
    progress.start(0)
    progress.update(20, METRICS, 83.0)
    progress.update(30, {"train/loss": 2.0})
    progress.evaluation(30, {"eval/loss": 2.10341, "eval/books/loss": 2.0})
    progress.notice("no [checkpoint] table")
    progress.close()
    assert out.getvalue().splitlines() == [
        "step   20/1000  loss 2.3451  norm 0.812  lr 3.00e-4  12.3k tok/s  mfu 41.0%  eta 1m23s",
        "step   30/1000  loss 2.0000",
        "step 30  eval/loss 2.1034  eval/books/loss 2.0000",
        "no [checkpoint] table",
    ]


def test_a_narrow_line_keeps_what_matters_most() -> None:
    assert describe(METRICS, 83.0) == "loss 2.3451  norm 0.812  lr 3.00e-4  12.3k tok/s  mfu 41.0%  eta 1m23s"
    assert describe(METRICS, 83.0, 60) == "loss 2.3451  norm 0.812  lr 3.00e-4  12.3k tok/s  eta 1m23s"
    assert describe(METRICS, 83.0, 40) == "loss 2.3451  12.3k tok/s  eta 1m23s"
    assert describe(METRICS, 83.0, 22) == "loss 2.3451  eta 1m23s"
    assert describe(METRICS, 83.0, 3) == "loss 2.3451"
    assert describe({}, None) == ""


def test_which_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_progress("auto", 10, Terminal()), BarProgress)
    monkeypatch.setenv("TERM", "dumb")  # a bar would show nothing there until the run is over
    assert isinstance(open_progress("auto", 10, Terminal()), PlainProgress)
    assert isinstance(open_progress("plain", 10, Terminal()), PlainProgress)
    assert isinstance(open_progress("off", 10, Terminal()), SilentProgress)


def test_off_is_silent_but_for_notices(capsys: pytest.CaptureFixture[str]) -> None:
    progress = open_progress("off", 10)
    progress.start(0)
    progress.update(1, METRICS, 1.0)
    progress.evaluation(1, {"eval/loss": 1.0})
    progress.notice("careful")
    progress.close()
    assert capsys.readouterr() == ("", "careful\n")


def test_no_standard_output_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert isinstance(open_progress("auto", 10), SilentProgress)


def test_the_bar_runs_no_thread_and_draws_at_most_ten_times_a_second() -> None:
    out = Terminal()
    before = threading.active_count()
    progress = BarProgress(out, 1000)
    progress.start(100)
    assert threading.active_count() == before
    written = []
    for step in range(101, 201):
        progress.update(step, METRICS, 5.0)
        written.append(out.tell())
    assert len(set(written)) < 20
    progress.notice("a [bold]literal[/bold] notice")
    progress.evaluation(200, {"eval/loss": 1.25})
    progress.close()
    text = out.getvalue()
    assert "a [bold]literal[/bold] notice" in text
    assert "eval/loss 1.2500" in text
    assert "step 200/1000" in text
    size = out.tell()
    progress.close()
    assert out.tell() == size


class Broken(Terminal):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


class Closed(Terminal):
    def write(self, text: str) -> int:
        raise ValueError("I/O operation on closed file.")


@pytest.mark.parametrize("mode", ["bar", "plain"])
@pytest.mark.parametrize("stream", [Broken, Closed])
def test_a_broken_stream_ends_the_display_only(mode: str, stream: Any) -> None:
    progress = open_progress(mode, 10, stream())
    for _ in range(2):
        progress.start(0)
        progress.update(1, METRICS, 1.0)
        progress.evaluation(1, {"eval/loss": 1.0})
        progress.notice("hello")
        progress.close()


LOOP = """
import sys
from forge_core.metrics.progress import open_progress
progress = open_progress(sys.argv[1], 3000)
progress.start(0)
for step in range(3000):
    progress.update(step, {"train/loss": 1.0})
    progress.notice("x" * 100)
progress.close()
print("y" * 100000)
print("the run is done", file=sys.stderr)
"""


@pytest.mark.parametrize("mode", ["bar", "plain"])
def test_a_reader_that_leaves(mode: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", LOOP, mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), errors) == (0, "the run is done\n")


def test_a_terminal_that_goes_away() -> None:
    leader, follower = pty.openpty()
    stream = os.fdopen(follower, "w")
    progress = open_progress("auto", 10, stream)
    assert isinstance(progress, BarProgress)
    progress.start(0)
    progress.update(1, METRICS, 1.0)
    shown = b""
    while b"2.3451" not in shown:  # a terminal hands on what was written in pieces
        shown += os.read(leader, 65536)
    os.close(leader)
    progress.notice("hello")
    progress.update(2, METRICS, 1.0)
    progress.close()
    with suppress(OSError):
        stream.close()
