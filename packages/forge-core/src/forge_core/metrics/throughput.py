"""Speed of a run: step time, tokens a second, MFU, peak memory, time left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

SMOOTHING = 0.2
"""Weight of the newest interval in the time left."""


class Meter:
    """Measures from one log step to the next. Between them it only adds up tokens.

    Args:
        max_steps: last update of the run, for the time left.
        flops_per_token: FLOPs of one token, forward and backward, or None. `flops_counted`: by name of what
            else is counted, of one of it. Both may change between updates.
        peak_flops: peak FLOP/s of one device, or None; without it there is no MFU.
        devices: how many devices share the work.
        synchronize: waits for the device; called where a pause begins, for it to hold no training time.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        max_steps: int,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        devices: int = 1,
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.max_steps = max_steps
        self.flops_per_token = flops_per_token
        self.flops_counted: Mapping[str, float] = {}
        self.peak_flops = peak_flops
        self.devices = devices
        self.synchronize = synchronize
        self.clock = clock
        self.tokens = 0
        self.flops = 0.0
        self.step = 0
        self.since = clock()
        self.paused_sec = 0.0
        self.wall_step_sec: float | None = None
        self.intervals = 0

    def start(self, step: int) -> None:
        """Begin after update `step` (0 for a fresh run)."""
        self.step, self.tokens, self.flops = step, 0, 0.0
        self.paused_sec, self.since = 0.0, self.clock()

    def count(self, tokens: int, counts: Mapping[str, int] | None = None) -> None:
        """Take in the tokens of one update, over all ranks, and by name what else was counted of it."""
        self.tokens += tokens
        self.flops += tokens * (self.flops_per_token or 0.0)
        if counts:
            self.flops += sum(each * counts.get(name, 0) for name, each in self.flops_counted.items())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is no training (evaluation, a blocking save): it takes time but does not slow the run."""
        if self.synchronize is not None:
            self.synchronize()
        begin = self.clock()
        try:
            yield
        finally:
            self.paused_sec += self.clock() - begin

    @property
    def busy_sec(self) -> float:
        """Seconds of training since the last measurement."""
        return self.clock() - self.since - self.paused_sec

    def measure(self, step: int) -> dict[str, float]:
        """Means since the last call: `train/step_time_sec`, `train/tokens_per_sec` (all ranks), `train/mfu`.

        Call it after the log step's read from the device, when the updates are really done. Empty if no
        update lies between. `train/mfu` = FLOPs a second / (peak * devices), a share of 1.
        """
        now, steps = self.clock(), step - self.step
        wall, busy = now - self.since, now - self.since - self.paused_sec
        tokens, flops = self.tokens, self.flops
        self.start(step)
        if steps <= 0 or busy <= 0:
            return {}
        self._smooth(wall / steps)
        metrics = {"train/step_time_sec": busy / steps, "train/tokens_per_sec": tokens / busy}
        if self.flops_per_token and self.peak_flops:
            metrics["train/mfu"] = flops / busy / (self.peak_flops * self.devices)
        return metrics

    @property
    def eta_sec(self) -> float | None:
        """Smoothed time left in seconds, None before the first measurement."""
        if self.wall_step_sec is None:
            return None
        return max(0, self.max_steps - self.step) * self.wall_step_sec

    def _smooth(self, step_sec: float) -> None:
        self.intervals += 1
        # The first interval holds compilation and first allocations; it says nothing about the rest.
        if self.wall_step_sec is None or self.intervals == 2:
            self.wall_step_sec = step_sec
        else:
            self.wall_step_sec += SMOOTHING * (step_sec - self.wall_step_sec)


def peak_memory_gb(device_type: str = "cpu") -> float | None:
    """Peak memory since the process began, in 1e9 bytes.

    On an accelerator what torch's allocator gave out, on a CPU the largest resident size of the process; None
    where the system does not say. Waits for nothing.
    """
    if device_type != "cpu":
        import torch

        read = getattr(getattr(torch, device_type, None), "max_memory_allocated", None)
        return None if read is None else float(read()) / 1e9
    size = _linux_peak()
    return size if size is not None else _posix_peak()


def _linux_peak() -> float | None:
    # Not getrusage: a child started by a large process inherits that process's figure. Not a file object
    # either: all together would take as long as the rest of a log step.
    try:
        file = os.open("/proc/self/status", os.O_RDONLY)
        try:
            status = os.read(file, 1 << 16)
        finally:
            os.close(file)
    except OSError:
        return None
    _, found, rest = status.partition(b"\nVmHWM:")
    return float(rest.split(maxsplit=1)[0]) * 1024 / 1e9 if found else None


def _posix_peak() -> float | None:
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
