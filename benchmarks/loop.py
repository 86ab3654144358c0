"""Cost of the loop: Forge beside a bare loop with the same model, data and optimizer, a step each in turn.

Each side runs in a process of its own and waits while the other takes its turn, so a ratio holds while the
speed of the machine drifts. Goals: see GOALS. The reads of a step are counted by
tests/core/test_loop_syncs.py.

usage: python benchmarks/loop.py [--json] [--check] [--pairs N] [--only full|compiled|tiny|start]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bare
from _common import Goal, Report, arguments, interval
from _loop_worker import forge_flags
from _side import Side

WORKER = Path(__file__).with_name("_loop_worker.py")
GOALS = {
    "full": Goal("4.6M-parameter step, eager", 1.01),
    "compiled": Goal("4.6M-parameter step, compiled, over bare eager", 0.95),
    "tiny": Goal("near-empty step", 1.08),
    "start": Goal("command to first step", 1.05),
}
THREADS = {"full": "2", "compiled": "2", "tiny": "1", "start": "2"}
STEPS_A_TURN = {"full": 1, "compiled": 1, "tiny": 20}
WARM_UP = {"full": 2, "compiled": 3, "tiny": 5}
PROCESSES = {"tiny": 5}
"""Processes a side, one after the other: how memory is laid out is luck, worth a few per cent of a step."""


def step_ratios(case: str, pairs: int) -> tuple[list[float], list[float]]:
    """Ratios of paired turns, and the bare loop's seconds a step."""
    ratios, seconds = [], []
    processes = PROCESSES.get(case, 1)
    for _ in range(processes):
        found, took = process_ratios(case, -(-pairs // processes))
        ratios += found
        seconds += took
    return ratios, seconds


def process_ratios(case: str, pairs: int) -> tuple[list[float], list[float]]:
    """The same of one process a side."""
    size = "tiny" if case == "tiny" else "full"
    steps = STEPS_A_TURN[case]
    threads = {"OMP_NUM_THREADS": THREADS[case]}
    bare = Side(WORKER, "bare", size, "eager", **threads)
    forge = Side(WORKER, "forge", size, "compiled" if case == "compiled" else "eager", **threads)
    ratios, seconds = [], []
    for _ in range(WARM_UP[case]):
        bare.take(steps)
        forge.take(steps)
    for number in range(pairs):
        if number % 2:
            b, f = bare.take(steps), forge.take(steps)
        else:
            f, b = forge.take(steps), bare.take(steps)
        ratios.append(f / b)
        seconds.append(b / steps)
    bare.close()
    forge.close()
    return ratios, seconds


def start_ratios(pairs: int) -> tuple[list[float], list[float]]:
    """Ratios of the time from command to first step done, and the bare script's seconds."""
    ratios, seconds = [], []
    for number in range(pairs):
        times = {}
        for kind in ("bare", "forge") if number % 2 else ("forge", "bare"):
            times[kind] = bare_start() if kind == "bare" else forge_start()
        ratios.append(times["forge"] / times["bare"])
        seconds.append(times["bare"])
    return ratios, seconds


def bare_start() -> float:
    """Seconds from the start of the bare script to the end of its first step."""
    side = Side(WORKER, "bare", "full", "eager", OMP_NUM_THREADS=THREADS["start"])
    side.close()
    return side.ready


def forge_start() -> float:
    """Seconds from `forge train` to the line that tells of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            *forge_flags(bare.SIZES["full"], folder),
            "--data.source=synthetic",
            "--eval.sample_tokens=0",
        ]
        command = [sys.executable, "-m", "forge_core", "train", "quickstart", *flags]
        env = {**os.environ, "OMP_NUM_THREADS": THREADS["start"]}
        began = time.time()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        ) as run:
            assert run.stdout is not None
            while not run.stdout.readline().startswith("step"):
                if run.poll() is not None:
                    raise SystemExit("forge train ended early")
            seconds = time.time() - began
            run.kill()
    return seconds


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=sorted(GOALS), action="append", help="measure just this")
    options = parser.parse_args()
    report = Report("loop", ["case", "bare", "forge / bare", "95 %", "goal"])
    for case, goal in GOALS.items():
        if options.only and case not in options.only:
            continue
        pairs = options.pairs or {"full": 30, "compiled": 30, "tiny": 100, "start": 20}[case]
        ratios, seconds = start_ratios(pairs) if case == "start" else step_ratios(case, pairs)
        report.ratio(case, goal, interval(ratios), bare_seconds=sorted(seconds)[len(seconds) // 2])
    report.finish(options)


if __name__ == "__main__":
    main()
