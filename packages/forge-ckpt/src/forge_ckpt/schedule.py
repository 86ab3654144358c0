"""When to save: every so many updates or minutes, and by a strategy inside a window. Imports no torch.

Category "save_strategy": `target(options) -> fires`, where `fires(offset)` says whether to save `offset`
updates after the first of the window; a pure function. `options` is the component's own table or None.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from forge_ckpt.table import CheckpointConfig

Strategy = Callable[[int], bool]


def power2(options: None) -> Strategy:
    """Fires at offsets 0 and the powers of two: dense at first, where a run changes fastest."""

    def fires(offset: int) -> bool:
        return offset & (offset - 1) == 0

    return fires


class SaveSchedule:
    """Answers whether a save is due after an update.

    Args:
        strategy: that of the window.
        clock: seconds, monotonic.
    """

    def __init__(
        self, config: CheckpointConfig, strategy: Strategy, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config, self.strategy, self.clock = config, strategy, clock
        self.saved_at = clock()

    def milestone(self, step: int) -> bool:
        """Whether the strategy of the window asks for this one."""
        window = self.config.window
        if window is None or not window[0] <= step <= window[1]:
            return False
        return self.strategy(step - window[0])

    def by_step(self, step: int) -> bool:
        """Whether one is due by the number of the step: inside the window the strategy decides alone."""
        config = self.config
        if config.window is not None and config.window[0] <= step <= config.window[1]:
            return self.milestone(step) or (step == 0 and config.initial)
        if step == 0:
            return config.initial
        return config.interval > 0 and step % config.interval == 0

    def by_time(self) -> bool:
        """Whether `minutes` have passed since the last save. Ranks may see it differently: rank 0 decides."""
        return self.config.minutes > 0 and self.clock() - self.saved_at >= 60 * self.config.minutes

    def saved(self) -> None:
        """A save begins now."""
        self.saved_at = self.clock()
