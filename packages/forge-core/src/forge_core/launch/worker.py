"""The side of a process that a launcher started: it ends with its launcher, and tells it why it failed."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from forge_core.launch.status import keep

LAUNCHER = "FORGE_LAUNCHER"
"""Variable of a started process: `PID:FD`, its launcher and the pipe for its report."""

LONGEST = 16_000
CONSEQUENCE = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused|aborted)|broken pipe|process ?group|TCPStore|"
    r"wait timeout|timed out (waiting )?after|collective",
    re.IGNORECASE,
)
"""What torch's errors say when another rank has gone."""

_reports: int | None = None


def attach() -> None:
    """Called first in a process that may have been started by `forge train --nproc`; else does nothing.

    The variable goes: a program that this one starts is no rank, and the descriptor is none of its own.
    """
    global _reports
    given = os.environ.pop(LAUNCHER, None)
    if given is None:
        return
    launcher, descriptor = map(int, given.split(":"))
    _reports = descriptor
    os.set_inheritable(descriptor, False)
    end_with(launcher)


def end_with(parent: int) -> None:
    """Make the kernel kill this process when `parent` dies, so that no rank is left behind."""
    if sys.platform == "linux":
        import ctypes  # three milliseconds that only a rank should spend

        set_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    else:
        import threading

        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before the call
        os._exit(128 + signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


def tell(error: BaseException, status: int, text: str) -> bool:
    """Tell the launcher why this process is about to end. True if the launcher shows it to the user.

    Args:
        error: what ends the process.
        status: its exit status.
        text: what is shown to the user.
    """
    if "TORCHELASTIC_ERROR_FILE" in os.environ and "torch" in sys.modules:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with suppress(Exception):
            get_error_handler().record_exception(error)
    consequence = is_consequence(error)
    if not consequence:
        keep(status)
    return _send(status=status, text=text[:LONGEST], time=time.time(), consequence=consequence)


def tell_folder(path: Path) -> None:
    """Tell the launcher where the run is written, for what no rank can write any more."""
    _send(folder=str(path.absolute()))


def _send(**message: object) -> bool:
    if _reports is None:
        return False
    import json

    try:
        os.write(_reports, json.dumps(message).encode() + b"\n")
    except OSError:
        return False
    return True


def place() -> str:
    """`rank 1: ` for one of several processes, else nothing: what an error message begins with."""
    return f"rank {os.environ.get('RANK', '?')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""


def is_consequence(error: BaseException) -> bool:
    """Whether an error looks like that of a rank whose peer has gone, rather than like a cause of its own."""
    for each in chain(error):
        if type(each).__name__ == "PeerError":
            return True
        of_torch = type(each).__module__.startswith("torch.") and type(each).__name__.startswith("Dist")
        if of_torch or (type(each) in (RuntimeError, TimeoutError) and CONSEQUENCE.search(str(each))):
            return True
    return False


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
