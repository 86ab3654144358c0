"""SIGTERM and SIGUSR1 ask the loop to end after the running step; a second signal ends the process at
once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignal:
    """A flag that signals set. The handler does nothing else: what is saved is always a finished update.

    On several ranks the flag is up once all ranks know of it, so that all stop after the same update.

    Args:
        deadline: seconds from the first signal until the process ends whatever it is doing; 0 waits for ever.
        shared: other ranks are to be told first (`flags`, `agree`).

    Attributes:
        received: the first signal of this process.
    """

    def __init__(self, deadline: float = 0.0, *, shared: bool = False) -> None:
        self.deadline = deadline
        self.shared = shared
        self.received: int | None = None
        self._agreed: int | None = None
        self._before: dict[int, Any] = {}
        self._timer: threading.Timer | None = None

    def __bool__(self) -> bool:
        return self.number is not None

    @property
    def number(self) -> int | None:
        """The signal that the run stops for; None while it goes on."""
        return self._agreed if self.shared else self.received

    def flags(self) -> list[int]:
        """1 for the signal that this process got, 0 for the others; to be summed over ranks."""
        return [int(number == self.received) for number in CAUGHT]

    def agree(self, sums: Sequence[int]) -> None:
        """Take in the sums of all ranks' `flags`, the same on every rank."""
        if self._agreed is None and any(sums):
            self._agreed = next(number for number, sum_ in zip(CAUGHT, sums, strict=True) if sum_)
            self._start_timer(self._agreed)

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in CAUGHT:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
        name = signal.Signals(number).name
        os.write(2, f"{name}: ending after the running step; a second signal ends at once\n".encode())
        self._start_timer(number)

    def _start_timer(self, number: int) -> None:
        if self.deadline > 0 and self._timer is None:
            self._timer = threading.Timer(self.deadline, os._exit, (128 + number,))
            self._timer.daemon = True
            self._timer.start()
