"""Frames of video files by time, with PyAV. Imports no torch."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from forge_core.errors import DataError, ForgeError
from forge_vlm.data.frames import Clip, Sampler
from forge_vlm.data.picture import Blob, Footage, Frame
from forge_vlm.data.pixels import ClipPixels, Pixels, pillow, prepared, prepared_frame
from forge_vlm.geometry import Geometry, PackedGeometry
from forge_vlm.geometry_split import unsplit

_LATE = 1.5
"""By how many frames the last one may come before the time that is asked for."""
_AHEAD = 8
"""Frames that are decoded and left out rather than sought over."""
_RATE = 25.0
"""Where a file does not say its rate."""


def pyav() -> Any:
    """The module `av`.

    Raises:
        ForgeError: it is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise ForgeError("reading videos needs the package 'av'", 'pip install "forge-vlm[video]"') from error
    return av


@contextmanager
def opened(clip: Blob) -> Iterator[tuple[Any, Any]]:
    """The container and its first stream of pictures.

    Raises:
        DataError: there is no such file, or nothing in it that can be decoded, also while it is read.
    """
    av = pyav()
    try:
        source = str(clip.path) if clip.size is None else io.BytesIO(clip.bytes())
        with av.open(source) as container:
            yield container, container.streams.video[0]
    except FileNotFoundError as error:
        raise DataError(f"there is no video {clip.path}") from error
    except (OSError, IndexError, ValueError, av.FFmpegError) as error:
        raise DataError(f"cannot read the video {clip}: {error}") from error


def look_at(clip: Blob, upright: bool = False) -> Clip:
    """How long it is.

    Args:
        upright: height and width as it is shown, which takes decoding a frame; otherwise as it is stored,
            which is the other way round where a camera was held upright.

    Raises:
        DataError: see `opened`.
    """
    with opened(clip) as (container, stream):
        rate = float(stream.average_rate or 0)
        height, width = stream.height, stream.width
        first = next(container.decode(stream), None) if upright else None
        if first is not None and _rotation(first) % 180:
            height, width = width, height
        if stream.duration is not None:
            seconds = float(stream.duration * stream.time_base)
        else:
            seconds = (container.duration or 0) / pyav().time_base
        if not seconds:
            seconds, count = _counted(container, stream)
            rate = count / seconds if seconds else rate
    return Clip(seconds=seconds, rate=rate or _RATE, height=height, width=width)


def _counted(container: Any, stream: Any) -> tuple[float, int]:
    """How long a video is that does not say so, in seconds, and its frames: its packets are read, and not
    decoded."""
    start = int(stream.start_time or 0)
    container.seek(start, stream=stream, backward=True)
    ends = [
        packet.pts + (packet.duration or 0) for packet in container.demux(stream) if packet.pts is not None
    ]
    return float((max(ends, default=start) - start) * stream.time_base), len(ends)


def _rotation(frame: Any) -> int:
    """Degrees, against the clock, by which a frame is turned to be shown: a multiple of 90."""
    return int(round(getattr(frame, "rotation", 0) / 90) * 90) % 360


def _shown(frame: Any) -> Any:
    """A frame as it is shown, as a Pillow image in RGB."""
    picture, turn = frame.to_image().convert("RGB"), _rotation(frame)
    return picture.transpose(getattr(pillow().Transpose, f"ROTATE_{turn}")) if turn else picture


def picked(clip: Blob, look: Clip, sampler: Sampler) -> tuple[Frame, ...]:
    """The frames that a policy picks of what is known of a video."""
    return tuple(Frame(clip, round(time, 6), look.height, look.width) for time in sampler(look))


def footage(clip: Blob, look: Clip, sampler: Sampler) -> Footage:
    """The frames that a policy picks of what is known of a video, as one clip.

    Each of n frames stands for an n-th of the video, as in transformers (`VideoMetadata.sampled_fps`).
    """
    times = tuple(round(time, 6) for time in sampler(look))
    seconds = 1 / (len(times) / look.frames * look.rate)
    return Footage(clip=clip, times=times, seconds=seconds, height=look.height, width=look.width)


def read_clip(found: Footage, geometry: Geometry) -> ClipPixels:
    """The frames of a clip, all of the one size that its length leaves them.

    Raises:
        DataError: see `read_frames`.
    """
    if not isinstance(geometry, PackedGeometry):
        raise DataError(f"the encoder does not see the frames of {found.clip} together")
    rows, columns = geometry.clip_grid_of(len(found.times), found.height or 1, found.width or 1)[1:]
    frames = _frames(found.clip, found.times, lambda each: prepared_frame(each, (rows, columns), geometry))
    return ClipPixels(np.stack(frames), found.seconds)


def read_frames(clip: Blob, times: Sequence[float], geometry: Geometry) -> list[Pixels]:
    """Frames at rising times, each (3, H, W) uint8: the first one at or after each time; where that is far
    off, or there is none, the one that is still shown.

    They are never cut into pieces. The file is opened once. Reading starts from the key frame before the
    first time, and again from one where the next time is far off.

    Raises:
        DataError: the file cannot be decoded, or ends before.
    """
    whole = unsplit(geometry)
    return _frames(clip, times, lambda each: prepared(each, whole))


def _frames(clip: Blob, times: Sequence[float], prepare: Callable[[Any], Pixels]) -> list[Pixels]:
    found: list[Pixels] = []
    with opened(clip) as (container, stream):
        step = 1 / (float(stream.average_rate or 0) or _RATE)
        near = min(step, 1 / (float(stream.guessed_rate or 0) or _RATE)) / 4
        reel = _Reel(container, stream, step)
        for time in times:
            if time > reel.at + _AHEAD * step:
                reel.seek(time)
            while reel.at < time - near and reel.next_at() - time <= _LATE * step:
                reel.advance()
            there = reel.frame is not None or reel.advance()  # it may start later
            late = time - reel.at > _LATE * step and time > reel.until
            if not there or (late and reel.next_at() == float("inf")):
                raise DataError(f"the video {clip} ends before {time:g} s")
            found.append(prepare(_shown(reel.frame)))
    return found


class _Reel:
    """Frames one after another, and the one behind.

    Attributes:
        frame: None before the first. at, until: when it is shown, in seconds after the first of the file.
    """

    def __init__(self, container: Any, stream: Any, step: float) -> None:
        self._container, self._stream, self._step = container, stream, step
        self._start = float((stream.start_time or 0) * stream.time_base)
        self._frames: Iterator[Any] = iter(())
        self._ahead: Any = None
        self.frame: Any = None
        self.at = self.until = float("-inf")

    def seek(self, time: float) -> None:
        """Go on from the key frame before a time."""
        at = int((time + self._start) / self._stream.time_base)
        self._container.seek(at, stream=self._stream, backward=True)
        self._frames = self._container.decode(self._stream)
        self._ahead, self.frame = None, None
        self.at = self.until = float("-inf")

    def next_at(self) -> float:
        """When the frame behind is shown; infinity: there is none."""
        if self._ahead is None:
            self._ahead = next(self._frames, None)
        if self._ahead is None:
            return float("inf")
        if self._ahead.time is None:
            return max(self.at + self._step, 0.0)
        return float(self._ahead.time - self._start)

    def advance(self) -> bool:
        """On to the frame behind; False: there is none."""
        at = self.next_at()
        if self._ahead is None:
            return False
        self.frame, self._ahead = self._ahead, None
        length = getattr(self.frame, "duration", None) or 0
        self.at, self.until = at, at + float(length * (self.frame.time_base or 0))
        return True
