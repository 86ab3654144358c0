"""Watches over the ranks of a run: passes signals on, ends those that a failed rank leaves behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from forge_core.launch.processes import RankProcess
from forge_core.launch.status import ORDERLY
from forge_core.launch.verdict import Ending

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
GRACE = 5.0
"""Seconds that the others get to end once a rank has failed."""
MARGIN = 10.0
"""Seconds beyond `run.save_deadline`, at which a rank ends itself."""
LOOK = 0.5
"""Seconds after which the ranks are looked at even if nothing seems to have happened."""


class Supervisor:
    """Runs until every rank has ended.

    Args:
        ranks: all started.
        deadline: seconds that ranks may take from a signal to their end (`run.save_deadline`); 0: any time.

    Attributes:
        forwarded: the signal that was passed on to the ranks, if any.
    """

    def __init__(self, ranks: Sequence[RankProcess], *, deadline: float) -> None:
        self.ranks = ranks
        self.deadline = deadline
        self.forwarded: int | None = None
        self._arrived: list[int] = []
        self._kill_at = float("inf")

    def run(self) -> list[Ending]:
        """Wait for all ranks; how each ended. Only in the main thread, which alone gets signals."""
        try:
            with self._signals() as wakeup, selectors.DefaultSelector() as selector:
                selector.register(wakeup, selectors.EVENT_READ)
                for rank in self.ranks:
                    for descriptor in rank.inputs:
                        selector.register(descriptor, selectors.EVENT_READ, rank)
                while any(rank.ending is None for rank in self.ranks):
                    self._turn(selector)
        finally:
            for rank in self.ranks:
                rank.kill()
                rank.process.wait()
                for descriptor in list(rank.inputs):
                    rank.close(descriptor)
        return [rank.ending for rank in self.ranks if rank.ending is not None]

    def _turn(self, selector: selectors.BaseSelector) -> None:
        left = max(0.0, self._kill_at - time.monotonic())
        for key, _ in selector.select(min(LOOK, left)):
            rank: RankProcess | None = key.data
            if rank is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 4096)
            elif key.fd in rank.inputs:
                rank.receive(key.fd)
            if rank is not None and key.fd not in rank.inputs:
                selector.unregister(key.fd)
        while self._arrived:
            self._forward(self._arrived.pop(0))
        for rank in self.ranks:
            before = set(rank.inputs)
            if rank.poll():
                for descriptor in before - set(rank.inputs):
                    selector.unregister(descriptor)
            self._note(rank)
        if time.monotonic() >= self._kill_at:
            self._kill()

    def _note(self, rank: RankProcess) -> None:
        """Once a rank has failed the others get GRACE; once one was stopped they get the time of a save."""
        failed = rank.ending.failed(self.forwarded) if rank.ending is not None else rank.report is not None
        if failed:
            self._limit(GRACE)
        elif rank.ending is not None and rank.ending.status in ORDERLY and self.deadline:
            self._limit(self.deadline + MARGIN)

    def _forward(self, number: int) -> None:
        if self.forwarded is not None:
            self._kill()
            return
        self.forwarded = number
        for rank in self.ranks:
            rank.send(number)
        if self.deadline:
            self._limit(self.deadline + MARGIN)

    def _limit(self, seconds: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _kill(self) -> None:
        self._kill_at = float("inf")
        for rank in self.ranks:
            rank.kill()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[int]:
        """Signals wake the loop by a byte in a pipe; its end to read from."""
        reads, writes = os.pipe()
        os.set_blocking(reads, False)
        os.set_blocking(writes, False)
        before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._arrive) for number in FORWARDED}
        handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        try:
            yield reads
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            os.close(reads)
            os.close(writes)

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(number)
