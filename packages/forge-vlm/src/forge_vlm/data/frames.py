"""Policies that say which frames of a video are looked at. Imports no torch.

Category "vlm_frames": `target(options) -> Sampler`, chosen by `vlm.video.frames`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise

import attrs

from forge_core.config import Config
from forge_core.data.source import SourceSpec
from forge_core.errors import DataError
from forge_vlm.data.options import StretchesOptions, UniformOptions


@attrs.frozen(kw_only=True)
class Clip:
    """What is known of a video before it is decoded.

    Attributes:
        seconds: from the start of the first frame to the end of the last one. rate: frames a second, mean.
        height, width: in pixels.
    """

    seconds: float
    rate: float
    height: int = 0
    width: int = 0

    @property
    def frames(self) -> int:
        """How many it has, about; at least 1."""
        return max(1, round(self.seconds * self.rate))

    @property
    def last(self) -> float:
        """When the last frame is shown, in seconds after the first."""
        return max(0.0, self.seconds - 1 / self.rate)


Sampler = Callable[[Clip], Sequence[float]]
"""A video -> times of frames in seconds after the first one, each above the one before, 0 to `last`."""


def uniform(options: UniformOptions) -> Sampler:
    """Frames at equal distances in time, about `fps` a second, the first and the last among them; the middle
    one where there is one alone."""

    def times(clip: Clip) -> list[float]:
        wanted = max(round(clip.seconds * options.fps), options.least)
        count = min(wanted, options.max_frames, clip.frames)
        if count == 1:
            return [clip.last / 2]
        return [clip.last * number / (count - 1) for number in range(count)]

    return times


def stretches(options: StretchesOptions) -> Sampler:
    """The first frame of each of n equal stretches, about `fps` to a second, n a multiple of `multiple`."""

    def times(clip: Clip) -> list[float]:
        total, unit = clip.frames, options.multiple
        most = min(options.max_frames, total) // unit * unit
        wanted = min(max(total / clip.rate * options.fps, options.min_frames), most)
        count = int(wanted // unit * unit) or min(total, unit)
        # the number of frames is rounded, so that the last of them may lie a little behind the end
        return [min(number * total // count / clip.rate, clip.last) for number in range(count)]

    return times


def code_of_sampler(spec: SourceSpec) -> str | None:
    """Changes with the policy that `[vlm.video]` picks, its options, and its code where it is somebody
    else's; None: its code cannot be found."""
    if spec.config is None or "vlm" not in spec.config or spec.component is None:
        return ""
    name = spec.config.get("vlm").video.frames
    found = f"{name}/{spec.config.options('vlm.video', name)!r}"
    if "/" not in name:
        return found
    try:
        module = inspect.getmodule(spec.component("vlm_frames", name))
        code = inspect.getsource(module) if module is not None else None
    except (OSError, TypeError):
        code = None
    return None if code is None else f"{found}/{code}"


def sampler_of(spec: SourceSpec) -> Sampler:
    """The policy that `[vlm.video]` picks.

    Raises:
        DataError: the run has no `[vlm]`.
    """
    config: Config | None = spec.config
    if config is None or "vlm" not in config or spec.component is None:
        raise DataError(f"{spec.name}: videos need a model that sees", "add the table [vlm]")
    name = config.get("vlm").video.frames
    sampler: Sampler = spec.component("vlm_frames", name)(config.options("vlm.video", name))

    def checked(clip: Clip) -> Sequence[float]:
        times = [float(time) for time in sampler(clip)]
        inside = times and times[0] >= 0 and times[-1] <= clip.last + 1e-6
        if not inside or any(a >= b for a, b in pairwise(times)):
            raise DataError(
                f"the policy {name} of vlm.video.frames picks {times[:8]} of a video of {clip.seconds:g} s",
                f"times rise, and are from 0 to {clip.last:g}",
            )
        return times

    return checked
