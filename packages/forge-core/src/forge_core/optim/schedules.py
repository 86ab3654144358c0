"""Learning-rate schedules: the factor on the base learning rate, a pure function of the update number.

Updates n count from 1. With W warm-up updates, r = min_lr_ratio, D updates of decay and t = n:

    warm-up    t / W                      for t < W
    after it   r + (1 - r) h(p)           with p = min(1, (t - W) / D)

so update W runs at the base learning rate, update W + D and all later ones at r times it; with D left
out, W + D is the last update of the run. `warmup_from_zero` takes t = n - 1 instead: the first update then
runs at 0 (if W > 0), and everything comes one update later. D is `decay_steps`, and where that is None or 0
all that remains (max_steps - W, less the plateau of wsd); where nothing remains the factor is 1.

    cosine     h = (1 + cos(pi p)) / 2    Loshchilov and Hutter, "SGDR" (2017), eq. 5
    linear     h = 1 - p
    wsd        1 for S = stable_steps updates after warm-up, then cosine, linear or sqrt: h = sqrt(1 - p),
               p counted from the end of the plateau.  Hu et al., "MiniCPM" (2024), section 4.2
    constant   1 after warm-up
    rex        max(r, (1 - p)^alpha)      after Chen et al., "REX" (2022), in its power form
    none       1 always, no warm-up
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence

from forge_core.config.tables import SchedulerConfig
from forge_core.optim.options import RexOptions, WsdOptions

Schedule = Callable[[int], float]

HEIGHTS: dict[str, Callable[[float], float]] = {
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    "linear": lambda p: 1.0 - p,
    "sqrt": lambda p: math.sqrt(1.0 - p),
}
"""Share of the decay still to come, from 1 at p = 0 to 0 at p = 1."""


def _warmed_up(config: SchedulerConfig, after: Callable[[int], float]) -> Schedule:
    warmup, shift = config.warmup_steps, int(config.warmup_from_zero)

    def factor(update: int) -> float:
        if update < 1:
            raise ValueError(f"updates count from 1, got {update}")
        t = update - shift
        return t / warmup if t < warmup else after(t - warmup)

    return factor


def _decayed(
    config: SchedulerConfig, max_steps: int, value: Callable[[float], float], plateau: int = 0
) -> Schedule:
    length = config.decay_steps or max_steps - config.warmup_steps - plateau

    def after(elapsed: int) -> float:
        if elapsed < plateau or length <= 0:
            return 1.0
        return value(min(1.0, (elapsed - plateau) / length))

    return _warmed_up(config, after)


def _towards(ratio: float, height: Callable[[float], float]) -> Callable[[float], float]:
    return lambda p: ratio + (1.0 - ratio) * height(p)


def cosine(config: SchedulerConfig, options: None, max_steps: int) -> Schedule:
    """Half a cosine from the base learning rate to `min_lr_ratio` times it."""
    return _decayed(config, max_steps, _towards(config.min_lr_ratio, HEIGHTS["cosine"]))


def linear(config: SchedulerConfig, options: None, max_steps: int) -> Schedule:
    """A straight line from the base learning rate to `min_lr_ratio` times it."""
    return _decayed(config, max_steps, _towards(config.min_lr_ratio, HEIGHTS["linear"]))


def wsd(config: SchedulerConfig, options: WsdOptions, max_steps: int) -> Schedule:
    """Warm-up, `stable_steps` updates at the base learning rate, then a decay of the chosen shape."""
    value = _towards(config.min_lr_ratio, HEIGHTS[options.decay])
    return _decayed(config, max_steps, value, plateau=options.stable_steps)


def constant(config: SchedulerConfig, options: None, max_steps: int) -> Schedule:
    """The base learning rate after warm-up."""
    return _warmed_up(config, lambda elapsed: 1.0)


def rex(config: SchedulerConfig, options: RexOptions, max_steps: int) -> Schedule:
    """A power of the share of updates that remain, never under `min_lr_ratio`."""
    return _decayed(config, max_steps, lambda p: max(config.min_lr_ratio, (1.0 - p) ** options.alpha))


def none(config: SchedulerConfig, options: None, max_steps: int) -> Schedule:
    """The base learning rate from the first update to the last."""
    return lambda update: 1.0


def phased(schedule: Schedule, phases: Sequence[tuple[int, float]]) -> Schedule:
    """`schedule` times the scale of the phase that update n belongs to, from the very first update of the
    phase.

    Args:
        schedule: factor by update number.
        phases: (first update, scale), by rising first update; updates before the first phase have scale 1.

    Raises:
        ValueError: the first updates do not rise.
    """
    starts = [start for start, _ in phases]
    if any(b <= a for a, b in itertools.pairwise(starts)):
        raise ValueError(f"phases must start one after another, got {starts}")
    scales = [1.0, *(scale for _, scale in phases)]
    return lambda update: schedule(update) * scales[bisect.bisect_right(starts, update)]
