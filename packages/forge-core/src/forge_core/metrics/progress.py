"""Progress of a run on the terminal: a bar, or one line a log step where there is no terminal.

Nothing here runs on a step that does not log, and there is no refresh thread. A stdout that is closed
(`| head`) ends the display and never the run.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from forge_core.metrics.numbers import duration, scientific, short

if TYPE_CHECKING:
    from rich.console import Console

SHOWN: tuple[tuple[str, Callable[[float], str], int], ...] = (
    ("train/loss", lambda value: f"loss {value:.4f}", 0),
    ("train/grad_norm", lambda value: f"norm {value:.3g}", 3),
    ("train/lr", lambda value: f"lr {scientific(value)}", 4),
    ("train/tokens_per_sec", lambda value: f"{short(value)} tok/s", 2),
    ("train/mfu", lambda value: f"mfu {value:.1%}", 5),
)
"""Metric, its text, and its rank: where the line is too narrow the highest rank goes first."""

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
ETA_RANK = 1
REFRESH_SEC = 0.1


class Progress(Protocol):
    """What shows a run to somebody who watches."""

    def start(self, step: int) -> None:
        """The run goes on after update `step` (0 for a fresh one)."""
        ...

    def update(self, step: int, metrics: Mapping[str, float], eta_sec: float | None = None) -> None:
        """The metrics of a log step and the time left."""
        ...

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The results of an evaluation."""
        ...

    def notice(self, text: str) -> None:
        """A line that stays: a warning, a sample, where the run folder is. Also after `close`."""
        ...

    def close(self) -> None:
        """The run is over. A second call does nothing."""
        ...


def open_progress(mode: str, max_steps: int, stream: TextIO | None = None) -> Progress:
    """The display of `metrics.progress`: "bar", "plain", "off", or "auto" (bar on a terminal, else lines)."""
    out: TextIO | None = sys.stdout if stream is None else stream
    if out is None:  # started without a standard output
        return SilentProgress()
    if mode == "auto":
        mode = "bar" if _is_terminal(out) else "plain"
    if mode == "bar":
        return BarProgress(out, max_steps)
    return PlainProgress(out, max_steps) if mode == "plain" else SilentProgress()


class PlainProgress:
    """One line a log step."""

    def __init__(self, stream: TextIO, max_steps: int) -> None:
        self.stream = stream
        self.max_steps = max_steps
        self.alive = True

    def start(self, step: int) -> None:
        """Nothing to show yet."""

    def update(self, step: int, metrics: Mapping[str, float], eta_sec: float | None = None) -> None:
        """`step  120/1000  loss 2.3451  norm 0.812  lr 3.00e-04  12.3k tok/s  eta 1m23s`"""
        width = len(str(self.max_steps))
        self.notice(f"step {step:>{width}}/{self.max_steps}  {describe(metrics, eta_sec)}")

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step 120  eval/loss 2.1034`"""
        self.notice(describe_evaluation(step, metrics))

    def notice(self, text: str) -> None:
        """Print it, unless nobody can read it any more."""
        if not self.alive:
            return
        try:
            self.stream.write(printable(text, self.stream) + "\n")
            self.stream.flush()
        except (OSError, ValueError):
            self.alive = False
            silence(self.stream)

    def close(self) -> None:
        """Nothing is held."""


class SilentProgress:
    """Shows no progress; notices go to stderr, because somebody should still see them."""

    def start(self, step: int) -> None: ...

    def update(self, step: int, metrics: Mapping[str, float], eta_sec: float | None = None) -> None: ...

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def notice(self, text: str) -> None:
        """Print it to stderr."""
        with suppress(OSError, ValueError):
            print(printable(text, sys.stderr), file=sys.stderr, flush=True)

    def close(self) -> None: ...


class MutedProgress(SilentProgress):
    """Of a rank whose notices another one shows, too."""

    def notice(self, text: str) -> None: ...


class BarProgress:
    """A bar that stays at the bottom; evaluations and notices are printed above it."""

    def __init__(self, stream: TextIO, max_steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self.stream = stream
        self.alive = True
        self.closed = False
        self.console = _console(stream)
        self.max_steps = max_steps
        self.bar_width = max(6, min(30, self.console.width - 95))
        self.bar = Progress(
            TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=self.bar_width),
            TextColumn(
                "{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
            ),
            console=self.console,
            auto_refresh=False,  # a refresh thread would take time from every step
        )
        self.task = self.bar.add_task("train", total=max_steps, text="")
        self.drawn = 0.0

    def start(self, step: int) -> None:
        """Draw the bar."""
        self._show(self.bar.start)
        self._show(lambda: self.bar.update(self.task, completed=step, refresh=True))

    def update(self, step: int, metrics: Mapping[str, float], eta_sec: float | None = None) -> None:
        """Move the bar, drawn at most ten times a second."""
        taken = len(f"step {step}/{self.max_steps} ") + self.bar_width + 1
        text = describe(metrics, eta_sec, self.console.width - taken)
        now = time.monotonic()
        due = now - self.drawn >= REFRESH_SEC
        if due:
            self.drawn = now
        self._show(lambda: self.bar.update(self.task, completed=step, text=text, refresh=due))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the results above the bar."""
        self.notice(describe_evaluation(step, metrics))

    def notice(self, text: str) -> None:
        """Print a line above the bar, or after it once it is closed."""
        clean = printable(text, self.stream)
        self._show(lambda: self.console.print(clean, markup=False, highlight=False, soft_wrap=True))

    def close(self) -> None:
        """Draw the last state and let go of the terminal."""
        if not self.closed:
            self.closed = True
            self._show(self.bar.refresh)
            self._show(self.bar.stop)

    def _show(self, action: Callable[[], None]) -> None:
        if not self.alive:
            return
        try:
            action()
        except (OSError, ValueError):
            self.alive = False
            silence(self.stream)
            with suppress(
                Exception
            ):  # rich may be left in any state; what counts is that it lets go of stdout
                self.bar.stop()


def describe(metrics: Mapping[str, float], eta_sec: float | None, width: int | None = None) -> str:
    """The numbers one watches, in a line of at most `width`; what was not measured is left out."""
    parts = [(rank, text(metrics[name])) for name, text, rank in SHOWN if name in metrics]
    if eta_sec is not None:
        parts.append((ETA_RANK, f"eta {duration(eta_sec)}"))
    while width is not None and len(parts) > 1 and len(_joined(parts)) > width:
        parts.remove(max(parts))
    return _joined(parts)


def _joined(parts: Sequence[tuple[int, str]]) -> str:
    return "  ".join(text for _, text in parts)


def describe_evaluation(step: int, metrics: Mapping[str, float]) -> str:
    """`step 120  eval/loss 2.1034  eval/books/loss 2.0011`"""
    return "  ".join([f"step {step}", *(f"{name} {value:.4f}" for name, value in metrics.items())])


def printable(text: str, stream: TextIO) -> str:
    """`text` as the stream can take it: models write control characters, and not every stream is UTF-8."""
    clean = CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return clean.encode(encoding, "replace").decode(encoding)


def silence(stream: TextIO) -> None:
    """Point a broken standard stream at the null device, so that the interpreter can flush it at its end."""
    with suppress(OSError, ValueError, AttributeError):
        if stream in (sys.stdout, sys.stderr):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def _is_terminal(stream: TextIO) -> bool:
    """Whether a bar can be drawn: on a terminal that moves its cursor, which `TERM=dumb` says it does not."""
    try:
        return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    except (OSError, ValueError):
        return False


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    class LastingConsole(Console):
        """rich answers a broken pipe by ending the process."""

        def on_broken_pipe(self) -> Any:
            self.quiet = True
            raise OSError("the terminal is gone")

    return LastingConsole(file=stream, force_terminal=True if _is_terminal(stream) else None)
