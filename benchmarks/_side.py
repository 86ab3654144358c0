"""A side of a pair that runs in a process of its own, and waits while the other one takes its turn."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


class Side:
    """One worker process, which says `ready SECONDS` and answers a number of steps with their seconds.

    Args:
        worker: its script. words: arguments. variables: of its environment, besides those of this process.

    Attributes:
        ready: seconds from its start to the end of its first step.
    """

    def __init__(self, worker: Path, *words: str, **variables: str) -> None:
        env = {**os.environ, **variables, "BENCH_BEGAN": str(time.time())}
        command = [sys.executable, str(worker), *words]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.ready = float(self._line().split()[1])

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self.process.args))} ended early")  # type: ignore[arg-type]
        return line

    def take(self, steps: int) -> float:
        """Run steps; the seconds they took."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        """Let it end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
