"""One rank's process as its launcher sees it: pipes for its output and for its report."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from forge_core.errors import ForgeError
from forge_core.launch.verdict import Ending, Report
from forge_core.launch.worker import LAUNCHER

LONGEST_LINE = 64 * 1024
DRAINED = 1000
"""Reads of what a rank left behind, each of at most LONGEST_LINE bytes."""
CLEAR_LINE = b"\r\x1b[2K"


class Lines:
    """Passes whole lines of a rank's output on, each with the rank in front.

    Args:
        rank: named in front of each line.
        target: file descriptor, or None to drop the output.
    """

    def __init__(self, rank: int, target: int | None) -> None:
        self.prefix = f"[rank {rank}] ".encode()
        self.target = target
        self.rest = b""
        # on a terminal rank 0 may have left a progress bar in this line; it draws it anew below
        self.before = CLEAR_LINE if target is not None and os.isatty(target) else b""

    def feed(self, data: bytes) -> None:
        """Output of the rank; nothing for its end."""
        *whole, self.rest = (self.rest + data).split(b"\n")
        if self.rest and (not data or len(self.rest) > LONGEST_LINE):
            whole.append(self.rest)
            self.rest = b""
        self._write(b"".join(self.before + self.prefix + line + b"\n" for line in whole))

    def _write(self, data: bytes) -> None:
        while data and self.target is not None:
            try:
                data = data[os.write(self.target, data) :]
            except BlockingIOError:
                select.select([], [self.target], [])
            except OSError:  # nobody reads any more; the ranks go on
                self.target = None


class Messages:
    """Takes what a rank says to its launcher: lines of JSON."""

    def __init__(self, take: Callable[[dict[str, Any]], None]) -> None:
        self.take = take
        self.rest = b""

    def feed(self, data: bytes) -> None:
        """What came through the pipe; nothing for its end."""
        *whole, self.rest = (self.rest + data).split(b"\n")
        for line in whole:
            self.take(json.loads(line))


@attrs.define(eq=False)
class RankProcess:
    """A started rank.

    Attributes:
        rank: its number.
        process: its process, leader of a process group of its own, so that Ctrl-C reaches only the launcher.
        inputs: file descriptor -> what takes the bytes that come from it.
        report: what it said about its failure.
        folder: where it said that the run is written.
        ending: how it ended, once it has.
        killed: the launcher sent SIGKILL.
    """

    rank: int
    process: subprocess.Popen[bytes]
    inputs: dict[int, Callable[[bytes], None]] = attrs.field(factory=dict)
    report: Report | None = None
    folder: str | None = None
    ending: Ending | None = None
    killed: bool = False

    def send(self, number: int) -> None:
        """A signal for the rank alone: processes that load its data would die of it."""
        if self.ending is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill(self) -> None:
        """End it and whatever it started."""
        if self.ending is None:
            self.killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def poll(self) -> bool:
        """Whether it has ended since it was last asked."""
        if self.ending is not None or self.process.poll() is None:
            return False
        self.drain()
        self.ending = Ending(
            rank=self.rank,
            code=self.process.returncode,
            time=time.time(),
            report=self.report,
            killed=self.killed,
        )
        return True

    def drain(self) -> None:
        """Take what is still in the pipes. Their end may never come: programs that it started hold them."""
        for descriptor in list(self.inputs):
            for _ in range(DRAINED):
                if not self.receive(descriptor):
                    break

    def receive(self, descriptor: int) -> bool:
        """Take what has arrived; False where nothing has."""
        try:
            data = os.read(descriptor, LONGEST_LINE)
        except BlockingIOError:
            return False
        if data:
            self.inputs[descriptor](data)
        else:
            self.close(descriptor)
        return bool(data)

    def close(self, descriptor: int) -> None:
        """Let go of a pipe."""
        self.inputs.pop(descriptor)(b"")
        os.close(descriptor)

    def _heard(self, message: dict[str, Any]) -> None:
        if "folder" in message:
            self.folder = message["folder"]
        elif self.report is None:
            self.report = Report(**message)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    rank: int,
    *,
    outputs: tuple[int | None, int | None] | None,
) -> RankProcess:
    """Start a rank.

    Args:
        command: program and arguments.
        environment: all its variables, but the one for its report.
        rank: its number.
        outputs: descriptors that take its standard output and error, line by line; None gives it those of
            this process.

    Raises:
        ForgeError: the system cannot start it.
    """
    reports, told = os.pipe()
    pipe = subprocess.PIPE if outputs is not None else None
    try:
        process = subprocess.Popen(
            command,
            env={**environment, LAUNCHER: f"{os.getpid()}:{told}"},
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            pass_fds=(told,),
            process_group=0,
        )
    except OSError as error:
        os.close(reports)
        raise ForgeError(f"cannot start rank {rank}: {command[0]}: {error.strerror}") from error
    finally:
        os.close(told)
    started = RankProcess(rank, process)
    started.inputs[reports] = Messages(started._heard).feed
    for stream, target in zip((process.stdout, process.stderr), outputs or (), strict=False):
        if stream is not None:
            own = os.dup(stream.fileno())  # the Popen object closes its own
            stream.close()
            started.inputs[own] = Lines(rank, target).feed
    for descriptor in started.inputs:
        os.set_blocking(descriptor, False)
    return started
