"""Ranks without torch: a script that does what a test says, and a launcher in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

RANK = """
import os, signal, sys, time
from forge_core.launch.worker import attach, tell
attach()
rank = int(os.environ["RANK"])
got = []
def on_signal(action):
    def handle(number, frame):
        got.append(number)
        action(number)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, handle)
def fail(error, status=1):
    tell(error, status, f"{type(error).__name__}: {error}")
    sys.exit(status)
def ready():
    with open(f"{__file__}.{rank}.tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{__file__}.{rank}.tmp", f"{__file__}.{rank}.pid")
"""
LAUNCHER = """
import sys
from forge_core.errors import ForgeError
from forge_core.launch import supervise
from forge_core.launch.local import run_local
supervise.MARGIN = supervise.GRACE = 1.0  # instead of 10 and 5 s
number, deadline, port, script = sys.argv[1:]
try:
    sys.exit(run_local([sys.executable, script], int(number), deadline=float(deadline), port=int(port)))
except ForgeError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_status)
"""
STARTED: list[subprocess.Popen[str]] = []
"""Every launcher; a test that fails must not leave any behind."""


def end_all() -> None:
    """Kill the launchers that still run; their ranks die with them."""
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=30)


def script(folder: Path, *actions: str) -> Path:
    """A rank's script; `actions[rank]` is what that rank does, the last one is for all further ranks."""
    path = folder / "rank.py"
    lines = [RANK]
    for rank, action in enumerate(actions):
        condition = f"rank == {rank}" if rank < len(actions) - 1 else "True"
        body = "\n".join("    " + line for line in action.splitlines())
        lines.append(f"{'el' if rank else ''}if {condition}:\n{body}")
    path.write_text("\n".join(lines))
    return path


def launch(
    path: Path, number: int = 2, deadline: float = 20.0, port: int = 0, **variables: str
) -> subprocess.Popen[str]:
    """Start a launcher over `number` ranks."""
    command = [sys.executable, "-c", LAUNCHER, str(number), str(deadline), str(port), str(path)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**clean_environment(), **variables},
    )
    STARTED.append(process)
    return process


def clean_environment() -> dict[str, str]:
    """This process's variables without those that a launcher or batch system sets."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(
            ("SLURM", "TORCHELASTIC_", "OMP_", "MASTER_", "FORGE_STATUS", "PYTHONUNBUFFERED")
        )
        and name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    }


def finish(process: subprocess.Popen[str], timeout: float = 30.0) -> tuple[int, str, str]:
    """Status and output of a process that ends."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def pids(process: subprocess.Popen[str], folder: Path, number: int = 2) -> list[int]:
    """The ranks' processes, by rank, once each has said that it is ready."""
    files = [folder / f"rank.py.{rank}.pid" for rank in range(number)]
    assert within(30, lambda: all(file.exists() for file in files) or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    return [int(file.read_text()) for file in files]


def gone(processes: Sequence[int], timeout: float = 10.0) -> bool:
    """Whether all processes end in time; one that nobody has waited for counts as ended."""
    return within(timeout, lambda: not any(_runs(pid) for pid in processes))


def within(timeout: float, condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true in time."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def kill(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    """A signal for a process, if it still runs."""
    if process.poll() is None:
        process.send_signal(number)
