"""The guard: what happens when a loss or a gradient is not finite, decided on the device.

The verdict of a step never costs a host sync: it is copied to host memory on the side, and the host looks at
it when it has arrived, one step later on an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from forge_core.config.tables import GuardConfig

RING = 8


class Verdicts:
    """The last verdicts of the device in host memory, read without a sync.

    Entry `step % RING` says whether the update of a step was refused, once the copy into it is done.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_accelerator = device.type != "cpu"
        self.bad = torch.zeros(RING, dtype=torch.bool, pin_memory=self.on_accelerator)
        self.slots = self.bad.unbind()
        self.host = self.bad.numpy()  # the same memory: reading it is no tensor operation
        self.events: dict[int, torch.Event] = {}

    def put(self, step: int, bad: Tensor) -> None:
        """Start copying the verdict () bool of `step`."""
        self.slots[step % RING].copy_(bad, non_blocking=True)
        if self.on_accelerator:
            event = torch.Event()
            event.record()
            self.events[step] = event

    def get(self, step: int, wait: bool) -> bool | None:
        """The verdict of `step`, or None where it is still on its way and `wait` is False."""
        event = self.events.get(step)
        if event is not None:
            if not wait and not event.query():
                return None
            event.synchronize()
            del self.events[step]
        return bool(self.host[step % RING])


class Guard:
    """Judges updates on the device and keeps count of bad ones on the host.

    A loss or norm that is not finite is bad; with `spike_sigma` also one that lies that many standard
    deviations above the mean of the last `spike_window` good steps, once a quarter of the window is filled.

    Args:
        config: of `[guard]`. device: where verdicts are made.
        together: other ranks act on the same verdicts, so that all must learn of one at the same step.

    Attributes:
        streak: bad steps in a row, as far as the host knows. Steps without a supervised token do not count.
        skipped: steps whose update was skipped, for whatever reason.
        incidents: bad steps that wrote their batch.
    """

    def __init__(self, config: GuardConfig, device: torch.device, *, together: bool = False) -> None:
        self.config = config
        self.together = together and device.type != "cpu"  # on a CPU a verdict is there at once
        self.verdicts = Verdicts(device)
        self.streak = 0
        self.skipped = 0
        self.incidents = 0
        self.pending: list[tuple[int, Tensor, Tensor]] = []
        size = config.spike_window if config.spike_sigma > 0 else 0
        self.window = torch.full((2, size), torch.nan, dtype=torch.float64, device=device)
        self.good = torch.zeros((), dtype=torch.int64, device=device)

    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """() bool on the device: the update may happen."""
        ok = torch.isfinite(loss + norm)  # an infinity or a NaN in either survives the sum
        if self.config.spike_sigma > 0:
            ok = ok & ~self._spike(torch.stack((loss.detach().double(), norm.double())), ok)
        return ok

    def _spike(self, values: Tensor, finite: Tensor) -> Tensor:
        size = self.window.shape[1]
        seen = ~torch.isnan(self.window)
        count = seen.sum(1).clamp(min=1)
        past = torch.where(seen, self.window, 0.0)
        mean = past.sum(1) / count
        deviation = (torch.where(seen, (self.window - mean[:, None]) ** 2, 0.0).sum(1) / count).sqrt()
        high = values > mean + self.config.spike_sigma * deviation.clamp(min=1e-12)
        spike = high.any() & (self.good >= max(2, size // 4))
        keep = finite & ~spike
        slot = torch.nn.functional.one_hot(self.good % size, size).bool() & keep
        self.window.copy_(torch.where(slot, values[:, None], self.window))
        self.good.add_(keep)
        return spike

    def observe(self, step: int, ok: Tensor, loss: Tensor, norm: Tensor) -> None:
        """Send the verdict of `step` on its way to the host."""
        self.verdicts.put(step, ~ok)
        self.pending.append((step, loss, norm))

    def learn(self, wait: bool = False) -> Iterator[tuple[int, float, float]]:
        """Take in the verdicts that have arrived, in order; yields the bad steps as (step, loss, norm).

        A verdict two steps old is waited for, so that the host never runs further ahead.
        """
        while self.pending:
            if self.together and len(self.pending) < 2 and not wait:
                return  # not when it happens to arrive, but one step late on every rank
            late = self.together or len(self.pending) > 2
            bad = self.verdicts.get(self.pending[0][0], wait or late)
            if bad is None:
                return
            step, loss, norm = self.pending.pop(0)
            self.streak = self.streak + 1 if bad else 0
            if bad:
                self.skipped += 1
                yield step, float(loss), float(norm)  # a bad step may wait for the device

    def state_dict(self) -> dict[str, Any]:
        """Counters and the spike window; everything that decides later verdicts."""
        return {
            "streak": self.streak,
            "skipped": self.skipped,
            "incidents": self.incidents,
            "window": self.window.cpu(),
            "good": int(self.good),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up saved counters; a window of another length starts empty."""
        self.streak, self.skipped, self.incidents = state["streak"], state["skipped"], state["incidents"]
        if state["window"].shape == self.window.shape:
            self.window.copy_(state["window"])
            self.good.fill_(state["good"])
