"""What the benchmarks share: paired timing, an interval for its ratio, goals, one table, one JSON object.

Two sides of a pair run one after the other in alternating order, so that their ratio holds while the speed
of the machine drifts. A ratio keeps its goal when the lower end of its 95 % interval is under the limit, from
at least 20 pairs; a plain value when it is under the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

FEWEST_PAIRS = 20


@dataclass(frozen=True)
class Goal:
    """What must be at most `limit`."""

    what: str
    limit: float


@dataclass(frozen=True)
class Interval:
    """Median of paired ratios with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    pairs: int

    def keeps(self, goal: Goal) -> bool:
        """Whether the goal is kept."""
        return self.pairs >= FEWEST_PAIRS and self.low <= goal.limit


def interval(ratios: Sequence[float], resamples: int = 4000) -> Interval:
    """Percentile bootstrap of the median, from a fixed seed.

    Raises:
        ValueError: no ratio at all.
    """
    values = np.asarray(ratios, dtype=np.float64)
    if not len(values):
        raise ValueError("no pair was measured")
    picks = np.random.default_rng(0).integers(0, len(values), (resamples, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return Interval(float(np.median(values)), float(low), float(high), len(values))


@dataclass(frozen=True)
class Pairs:
    """Seconds of both sides, pair by pair."""

    first: list[float]
    second: list[float]

    def ratio(self) -> Interval:
        """Second over first."""
        return interval([b / a for a, b in zip(self.first, self.second, strict=True)])


def paired(
    first: Callable[[], object],
    second: Callable[[], object],
    pairs: int,
    *,
    repeat: int = 1,
    warm_up: int = 2,
    budget: float = float("inf"),
) -> Pairs:
    """Time both sides in this process, in alternating order.

    Args:
        first, second: what is timed.
        pairs: how many pairs.
        repeat: calls of a side in a turn, for what is too short to be timed alone.
        warm_up: pairs before that are not counted.
        budget: seconds after which no further pair begins.
    """
    found = Pairs([], [])
    began = time.perf_counter()
    for number in range(-warm_up, pairs):
        if number > 0 and time.perf_counter() - began > budget:
            break
        if number % 2:
            a, b = _seconds(first, repeat), _seconds(second, repeat)
        else:
            b, a = _seconds(second, repeat), _seconds(first, repeat)
        if number >= 0:
            found.first.append(a)
            found.second.append(b)
    return found


def _seconds(side: Callable[[], object], repeat: int) -> float:
    began = time.perf_counter()
    for _ in range(repeat):
        side()
    return (time.perf_counter() - began) / repeat


def arguments(description: str) -> argparse.ArgumentParser:
    """The flags that every benchmark takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    parser.add_argument("--pairs", type=int, help="pairs of each ratio, instead of each case's own number")
    return parser


class Report:
    """Rows of one table, each with or without a goal.

    Args:
        name: of the benchmark.
        columns: headings: case, one for each keyword that rows are given, value, interval, goal.
    """

    def __init__(self, name: str, columns: Sequence[str]) -> None:
        self.name, self.columns = name, list(columns)
        self.rows: list[list[str]] = []
        self.results: dict[str, dict[str, Any]] = {}

    def ratio(self, case: str, goal: Goal | None, found: Interval, **extra: float) -> None:
        """A row with a paired ratio. Extra columns are formatted by the unit their name ends in."""
        kept = goal is None or found.keeps(goal)
        numbers = {"median": found.median, "low": found.low, "high": found.high, "pairs": found.pairs}
        spread = f"{found.low:.3f} - {found.high:.3f}"
        if found.pairs < FEWEST_PAIRS:
            spread += f", {found.pairs} pairs"
        self._add(case, goal, kept, f"{found.median:.3f}", spread, extra, numbers)

    def value(self, case: str, goal: Goal | None, found: float, **extra: float) -> None:
        """A row with a plain number."""
        kept = goal is None or found <= goal.limit
        self._add(case, goal, kept, f"{found:.3g}", "", extra, {"value": found})

    def _add(
        self,
        case: str,
        goal: Goal | None,
        kept: bool,
        value: str,
        spread: str,
        extra: dict[str, float],
        numbers: dict[str, float],
    ) -> None:
        verdict = "" if goal is None else f"{'kept' if kept else 'MISSED'} (at most {goal.limit:g})"
        self.rows.append(
            [case, *(_formatted(key, number) for key, number in extra.items()), value, spread, verdict]
        )
        self.results[case] = {**extra, **numbers}
        if goal is not None:
            self.results[case] |= {"goal": goal.what, "limit": goal.limit, "kept": kept}
        print(" · ".join(cell for cell in self.rows[-1] if cell), file=sys.stderr, flush=True)

    def finish(self, options: argparse.Namespace) -> None:
        """Print everything; with `--check` exit 1 when a goal is missed."""
        print(_table(self.columns, self.rows))
        missed = [case for case, result in self.results.items() if not result.get("kept", True)]
        if options.json:
            print(json.dumps({"benchmark": self.name, "machine": _machine(), "results": self.results}))
        if options.check and missed:
            print(f"missed: {', '.join(missed)}", file=sys.stderr)
            raise SystemExit(1)


def _formatted(name: str, value: float) -> str:
    if name.endswith("seconds"):
        scale, unit = (1, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "us")
        return f"{value * scale:.3g} {unit}"
    if name.endswith("bytes"):
        return f"{value / 1e6:.0f} MB"
    return f"{value:.3g}"


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(columns))]
    ruled = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in ruled
    )


def _machine() -> dict[str, Any]:
    """What a figure depends on; torch only where the benchmark itself runs it."""
    torch = sys.modules.get("torch")
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": None if torch is None else torch.__version__,
    }
