"""SIGTERM and SIGUSR1 ask the loop to end after the running step; a second signal ends the process at
once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignal:
    """A flag that signals set. The handler does nothing else: what is saved is always a finished update.

    Args:
        deadline: seconds from the first signal until the process ends whatever it is doing; 0 waits for ever.
    """

    def __init__(self, deadline: float = 0.0) -> None:
        self.deadline = deadline
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._timer: threading.Timer | None = None

    def __bool__(self) -> bool:
        return self.received is not None

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
        if self.deadline > 0:
            self._timer = threading.Timer(self.deadline, os._exit, (128 + number,))
            self._timer.daemon = True
            self._timer.start()
