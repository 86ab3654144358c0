"""`forge train --nproc N`: the ranks of a run on this machine.

torchrun's agent is not used for it: that turns every exit status into 1, ends ranks 30 s after a signal
however long their save takes, and imports torch first. What the ranks do among themselves is torch's: they
meet by its environment variables and store, as under torchrun.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from forge_core.errors import ForgeError, UsageError
from forge_core.launch.environment import for_rank
from forge_core.launch.ports import ReservedPort
from forge_core.launch.processes import RankProcess, start
from forge_core.launch.supervise import Supervisor
from forge_core.launch.verdict import Ending, cause_of, explain, status_of

MOST = 1024


def check_nproc(nproc: int) -> None:
    """Raise UsageError where `nproc` ranks cannot be started."""
    if not 1 <= nproc <= MOST:
        raise UsageError(f"--nproc {nproc} is no number of processes", f"a number from 1 to {MOST}")
    if nproc > 1 and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            f"--nproc {nproc} inside a process of a launcher (WORLD_SIZE={os.environ['WORLD_SIZE']})",
            "leave --nproc out: the launcher starts the processes",
        )


def run_local(command: Sequence[str], nproc: int, *, deadline: float, port: int = 0) -> int:
    """Run `command` as `nproc` ranks and wait for them; the exit status of the run.

    Rank 0 has this process's output, those of the others come line by line with the rank in front.

    Args:
        command: program and arguments, the same for all ranks.
        nproc: number of ranks.
        deadline: `run.save_deadline`, in seconds.
        port: where the ranks meet; 0: any free one.

    Raises:
        UsageError: the port is taken; ForgeError: the system starts no process.
    """
    with ReservedPort(port) as reserved, _writing_from_the_background():
        ranks: list[RankProcess] = []
        others = (_descriptor(sys.stdout), _descriptor(sys.stderr))
        try:
            for rank in range(nproc):
                variables = for_rank(os.environ, rank, nproc, reserved.number)
                ranks.append(start(command, variables, rank, outputs=others if rank else None))
        except BaseException:
            for started in ranks:
                started.kill()
            raise
        supervisor = Supervisor(ranks, deadline=deadline)
        endings = supervisor.run()
    lines = explain(endings, supervisor.forwarded)
    status = status_of(endings, supervisor.forwarded)
    with contextlib.suppress(OSError, ValueError):
        print("".join(f"{line}\n" for line in lines), end="", file=sys.stderr, flush=True)
    cause = cause_of(endings, supervisor.forwarded)
    if status and (folder := next((rank.folder for rank in ranks if rank.folder), None)):
        with contextlib.suppress(ForgeError):
            write_exit(Path(folder), status, lines, cause)
    return status


def write_exit(folder: Path, status: int, lines: Sequence[str], cause: Ending | None) -> None:
    """Write the run's `exit.json` where no rank could: none was left, or none knew why another was gone.

    Args:
        folder: of the run.
        status: of the run.
        lines: what the user is told; the first begins with `error: `.
        cause: the rank that failed first, if one did.
    """
    from forge_core.loop.folder import RunFolder

    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / "exit.json").read_text(encoding="utf-8"))
    if found and (cause is None or cause.report is not None):
        return
    run = RunFolder(name=folder.name, path=folder, named=True)
    reason, *more = lines[0].splitlines() if lines else ["ended before it could say why"]
    step = found.get("step", run.last_step)
    found = {"status": status, "reason": reason.removeprefix("error: "), "step": step}
    if hints := [line.strip().removeprefix("hint: ") for line in more if line.strip().startswith("hint: ")]:
        found["hint"] = hints[0]
    if cause is not None:
        found["rank"] = cause.rank
    run.write_json("exit.json", found)


def forge_command(*arguments: str) -> list[str]:
    """The command line that runs `forge` with this interpreter and its options."""
    words = [sys.executable]
    if sys.flags.safe_path or Path.cwd().as_posix() not in sys.path:
        words.append("-P")  # the console script looks for modules in no current directory, nor do its ranks
    for option in sys.warnoptions:
        words.append(f"-W{option}")
    for name, value in sys._xoptions.items():
        words.append(f"-X{name}" if value is True else f"-X{name}={value}")
    return [*words, "-m", "forge_core", *arguments]


def _descriptor(stream: TextIO | None) -> int | None:
    """Where a standard stream ends, or None if it is closed or is no file."""
    if stream is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
        return stream.fileno()
    return None


@contextlib.contextmanager
def _writing_from_the_background() -> Iterator[None]:
    """Let rank 0 write to a terminal that stops background processes which do (`stty tostop`)."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTTOU, before)
