"""Frames of video files by time, with PyAV. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np

from forge_core.errors import DataError, ForgeError
from forge_vlm.data.pixels import Pixels, prepared
from forge_vlm.geometry import ImageGeometry

_LATE = 1.5
"""By how many frames the last one may come before the time that is asked for."""


@attrs.frozen
class Frame:
    """The first frame of `path` at or after `time` seconds."""

    path: Path
    time: float


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


def frames_of(path: Path, *, fps: float, least: int, most: int) -> tuple[Frame, ...]:
    """Frames at equal distances in time from the first to the last, about `fps` a second.

    Raises:
        DataError: there is no such file, or no video in it.
    """
    av = pyav()
    try:
        with av.open(str(path)) as clip:
            stream = clip.streams.video[0]
            rate = float(stream.average_rate or 0) or 25.0
            if stream.duration is not None:
                length = float(stream.duration * stream.time_base)
            else:
                length = (clip.duration or 0) / av.time_base
    except FileNotFoundError as error:
        raise DataError(f"there is no video {path}") from error
    except (OSError, IndexError, ValueError, av.FFmpegError) as error:
        raise DataError(f"cannot read the video {path}: {error}") from error
    count = min(max(round(length * fps), least), most, max(1, round(length * rate)))
    last = max(0.0, length - 1 / rate)
    return tuple(Frame(path, round(float(t), 6)) for t in np.linspace(0.0, last, count))


def read_frame(frame: Frame, geometry: ImageGeometry) -> Pixels:
    """One frame as (3, size, size) uint8; reading starts from the key frame before it.

    Raises:
        DataError: the file cannot be decoded, or ends before.
    """
    av = pyav()
    found: Any = None
    try:
        with av.open(str(frame.path)) as clip:
            stream = clip.streams.video[0]
            step = 1 / (float(stream.average_rate or 0) or 25.0)
            start = float((stream.start_time or 0) * stream.time_base)
            clip.seek(int((frame.time + start) / stream.time_base), stream=stream, backward=True)
            for found in clip.decode(stream):
                if found.time is None or found.time - start >= frame.time - step / 4:
                    break
            late = found is None or (
                found.time is not None and frame.time - (found.time - start) > _LATE * step
            )
            if late:
                raise DataError(f"the video {frame.path} ends before {frame.time:g} s")
            return prepared(found.to_image().convert("RGB"), geometry)
    except (OSError, IndexError, ValueError, av.FFmpegError) as error:
        raise DataError(f"cannot read the video {frame.path}: {error}") from error
