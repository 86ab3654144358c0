"""Standing worker processes for tests of several ranks: starting them costs seconds, so they stay."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import itertools
import multiprocessing
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

from forge_core.testing import worker

GRACE = 5.0
"""Seconds that the other ranks get to finish once one has failed; they may wait for it in a collective."""
START = 120.0
"""Seconds that a process may take to start and import torch."""


@attrs.frozen
class Failure:
    """What became of one rank.

    Attributes:
        kind: name of the exception's class; else "ended" (its process did), "timeout" (no answer in time) or
            "abandoned" (at work when another rank failed).
        text: its traceback, its stack, or the exit status.
    """

    kind: str
    text: str


class WorkerError(Exception):
    """A function failed on some ranks; the message holds their tracebacks.

    Attributes:
        failures: rank -> what became of it.
    """

    def __init__(self, function: str, failures: Mapping[int, Failure]) -> None:
        self.failures = dict(sorted(failures.items()))
        ranks = ", ".join(map(str, self.failures))
        blocks = [f"--- rank {rank}: {f.kind} ---\n{f.text.rstrip()}" for rank, f in self.failures.items()]
        super().__init__("\n".join([f"{function} failed on rank {ranks}", *blocks]))


class WorkerTimeoutError(WorkerError, TimeoutError):
    """The time limit passed; the message holds the stacks of the ranks that hung."""


class WorkerPool:
    """`size` processes with a gloo group over them, started at the first `run` and kept until `close`.

        with WorkerPool(2) as pool:
            losses = pool.run(train_on_this_rank, "fp64")     # one result a rank

    What goes in and comes out is plain data: tensors, numbers, strings, None, lists, tuples and dicts. In a
    worker RANK, WORLD_SIZE and the other variables of a launcher are set, torch has one thread and seed 0.

    Args:
        size: number of processes.
        timeout: seconds that a `run` may take, unless it says otherwise.
    """

    def __init__(self, size: int, *, timeout: float = 60.0) -> None:
        self.size, self.timeout = size, timeout
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder: Path | None = None
        self._count = itertools.count()
        self._reset = False

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float | None = None,
        group: str = "shared",
    ) -> list[Any]:
        """Call `function(*arguments)` on every rank; the results by rank.

        Args:
            function: importable, that is defined at the top of a module or as a static method there.
            arguments: plain data, the same for all ranks.
            timeout: seconds until the pool gives up, once the processes have started.
            group: "shared" keeps one process group over all runs, "fresh" makes a new one for this run,
                "none" makes none: the function does, from the environment variables of a launcher.

        Raises:
            WorkerError: it raised, or a process ended.
            WorkerTimeoutError: it took too long. The processes of a pool that did not finish are killed
                (only they) and made anew by the next `run`.
        """
        if group not in ("shared", "fresh", "none"):
            raise ValueError(f"group is {group!r}, not shared, fresh or none")
        limit = self.timeout if timeout is None else timeout
        self._start()
        job = self._job(function, arguments, limit, group)
        self._reset = True  # until this run has gone well
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a dead process is found out below
                pipe.send_bytes(job)
        try:
            answers, failures = self._answers(limit)
        except BaseException:  # interrupted: what the processes still answer belongs to no later run
            self._kill()
            raise
        if len(answers) < self.size:
            self._kill()
        else:
            self._reset = bool(failures)
        if failures:
            kinds = {failure.kind for failure in failures.values()}
            raise (WorkerTimeoutError if kinds == {"timeout"} else WorkerError)(
                function.__qualname__, failures
            )
        return [answers[rank]["value"] for rank in range(self.size)]

    def close(self) -> None:
        """Ask the processes to end, and kill those that have not after some seconds."""
        atexit.unregister(self.close)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(worker.pack(None))
        for process in self._processes:
            process.join(GRACE)
        self._kill()

    def _job(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], limit: float, group: str
    ) -> bytes:
        name, file = function.__qualname__, inspect.getsourcefile(function)
        if "<" in name or file is None:
            raise ValueError(
                f"{name} cannot be imported by another process; define it at the top of a module"
            )
        return worker.pack(
            {
                "module": function.__module__,
                "file": file,
                "name": name,
                "arguments": arguments,
                "timeout": float(limit),
                "group": group,
                "reset": self._reset,
                "store": f"{self._folder}/store{next(self._count)}",
                "port": _free_port() if group == "none" else 0,
                "cwd": str(Path.cwd()),
                "path": list(sys.path),
            }
        )

    def _start(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self._kill()
        context = multiprocessing.get_context("spawn")
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="forge-pool-"))
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=worker.main,
                args=(rank, self.size, str(self._folder), theirs),
                name=f"forge-worker-{rank}",
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        atexit.register(self.close)
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(START):
                self._kill()
                raise WorkerTimeoutError("start", {rank: Failure("timeout", f"not there after {START:g} s")})
            pipe.recv_bytes()

    def _answers(self, limit: float) -> tuple[dict[int, Any], dict[int, Failure]]:
        """(answers, failures) by rank; a rank without an answer has ended or hangs."""
        answers: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        deadline = time.monotonic() + limit + GRACE  # the worker writes its stack at `limit`
        while waiting := [r for r in range(self.size) if r not in answers and r not in failures]:
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
            ready = wait([self._pipes[r] for r in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [r for r in waiting if self._pipes[r] in ready]:
                try:
                    answers[rank] = worker.unpack(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(GRACE)
                    failures[rank] = Failure("ended", f"with status {self._processes[rank].exitcode}")
                    continue
                if "value" not in answers[rank]:
                    failures[rank] = Failure(answers[rank]["type"], answers[rank]["traceback"])
        for rank in waiting:
            failures[rank] = self._silent(rank, limit)
        return answers, failures

    def _silent(self, rank: int, limit: float) -> Failure:
        assert self._folder is not None
        path = self._folder / f"stacks{rank}.txt"
        stacks = path.read_text() if path.exists() else ""
        if not stacks:
            return Failure("abandoned", "still at work when another rank failed")
        return Failure("timeout", f"no answer within {limit:g} s\n{stacks}")

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._reset = [], [], False
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
