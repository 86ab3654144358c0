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
from forge_vlm.data.pixels import ClipPixels, Pixels, prepared, prepared_frame
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


def look_at(clip: Blob) -> Clip:
    """How long it is.

    Raises:
        DataError: see `opened`.
    """
    with opened(clip) as (container, stream):
        rate = float(stream.average_rate or 0) or _RATE
        if stream.duration is not None:
            seconds = float(stream.duration * stream.time_base)
        else:
            seconds = (container.duration or 0) / pyav().time_base
        height, width = stream.height, stream.width
    return Clip(seconds=seconds, rate=rate, height=height, width=width)


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
    """Frames at rising times, each (3, H, W) uint8: the first one at or after each time.

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
        start = float((stream.start_time or 0) * stream.time_base)
        frames: Iterator[Any] = iter(())
        frame, at = None, float("-inf")
        for time in times:
            if time > at + _AHEAD * step:
                container.seek(int((time + start) / stream.time_base), stream=stream, backward=True)
                frames = container.decode(stream)
            while frame is None or at < time - step / 4:
                following = next(frames, None)
                if following is None:
                    break
                frame = following
                at = time if frame.time is None else frame.time - start
            if frame is None or time - at > _LATE * step:
                raise DataError(f"the video {clip} ends before {time:g} s")
            found.append(prepare(frame.to_image().convert("RGB")))
    return found
