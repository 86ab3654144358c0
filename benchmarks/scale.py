"""Cost of several processes: Forge with FSDP2 on two beside a bare FSDP2 loop on two, a step each in turn.

Each side runs in two processes of one thread and waits while the other takes its turn. Collectives of a step
are counted on rank 0 and must be the bare loop's and at most one more; with four micro-batches gradients are
reduced as often as with one. Goals: see GOALS.

usage: python benchmarks/scale.py [--json] [--check] [--pairs N] [--only step|collectives|accumulation]
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from _common import Goal, Report, arguments, interval

WORKER = Path(__file__).with_name("_scale_worker.py")
RANKS = 2
GOALS = {
    "step": Goal("4.6M-parameter step, FSDP2 on 2 processes", 1.05),
    "collectives": Goal("collectives of a step beyond the bare loop's", 1.0),
    "accumulation": Goal("reductions of gradients with 4 micro-batches beyond those with 1", 0.0),
}
WARM_UP = 3


class Side:
    """The processes of one side."""

    def __init__(self, kind: str, size: str, accumulate: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-W", "ignore", str(WORKER), kind, size, str(accumulate)]
        self.ranks = []
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(RANKS):
            env = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "BENCH_FOLDER": self.folder.name,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            self.ranks.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env))
        self._line()

    def _line(self) -> str:
        out = self.ranks[0].stdout
        assert out is not None
        line = out.readline()
        if not line:
            self.close()
            raise SystemExit(f"{' '.join(map(str, self.ranks[0].args))} ended early")  # type: ignore[arg-type]
        return line

    def _say(self, line: str) -> str:
        into = self.ranks[0].stdin
        assert into is not None
        into.write(f"{line}\n")
        into.flush()
        return self._line()

    def take(self, steps: int) -> float:
        """Run steps; the seconds they took."""
        return float(self._say(str(steps)))

    def collectives(self) -> dict[str, int]:
        """Collectives of one step by name."""
        found: dict[str, int] = json.loads(self._say("count"))
        return found

    def close(self) -> None:
        for process in reversed(self.ranks):
            process.kill()
            process.wait(60)
        self.folder.cleanup()


def step_ratios(pairs: int) -> tuple[list[float], list[float]]:
    """Ratios of paired steps, and the bare loop's seconds."""
    bare, forge = Side("bare", "full", 2), Side("forge", "full", 2)
    ratios, seconds = [], []
    for number in range(-WARM_UP, pairs):
        first, second = (bare, forge) if number % 2 else (forge, bare)
        times = {id(first): first.take(1), id(second): second.take(1)}
        if number >= 0:
            ratios.append(times[id(forge)] / times[id(bare)])
            seconds.append(times[id(bare)])
    bare.close()
    forge.close()
    return ratios, seconds


def counted(kind: str, accumulate: int) -> dict[str, int]:
    """Collectives of one step, after one that may set things up."""
    side = Side(kind, "tiny", accumulate)
    side.take(1)
    found = side.collectives()
    side.close()
    print(f"{kind}, {accumulate} micro-batch(es): {_told(found)}", file=sys.stderr, flush=True)
    return found


def _told(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(found.items()))


def reductions(found: Mapping[str, int]) -> int:
    """Of gradients: FSDP2 scatters their sums."""
    return sum(number for name, number in found.items() if "reduce_scatter" in name)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=sorted(GOALS), action="append", help="measure just this")
    options = parser.parse_args()
    wanted = options.only or list(GOALS)
    report = Report("scale", ["case", "bare", "forge / bare", "95 %", "goal"])
    if "collectives" in wanted:
        bare, forge = counted("bare", 1), counted("forge", 1)
        extra = sum(forge.values()) - sum(bare.values())
        report.value("collectives", GOALS["collectives"], extra, bare=float(sum(bare.values())))
    if "accumulation" in wanted:
        one, four = (reductions(counted("forge", number)) for number in (1, 4))
        report.value("accumulation", GOALS["accumulation"], four - one, bare=float(one))
    if "step" in wanted:
        ratios, seconds = step_ratios(options.pairs or 30)
        report.ratio("step", GOALS["step"], interval(ratios), bare_seconds=sorted(seconds)[len(seconds) // 2])
    report.finish(options)


if __name__ == "__main__":
    main()
