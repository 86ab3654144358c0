"""Where images and frames are, and reading them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from forge_core.data.wording import counted
from forge_core.errors import DataError
from forge_vlm.data.pixels import ClipPixels, Pixels, Shown, read_pixels, size_of
from forge_vlm.geometry import Geometry

MEND = 'mend the file, or set unreadable = "mask"'
"""The way out of a picture that cannot be read."""


@attrs.frozen
class Blob:
    """A file, or a stretch of one (a member of a tar).

    Attributes:
        path: the file. name: the same on every machine; in messages and fingerprints.
        offset, size: of the stretch in bytes; size None: all.
    """

    path: Path
    name: str
    offset: int = 0
    size: int | None = None

    def __str__(self) -> str:
        return self.name

    def bytes(self) -> bytes:
        """Its content.

        Raises:
            DataError: it is not there, or ends before.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                found = file.read(-1 if self.size is None else self.size)
        except FileNotFoundError as error:
            raise DataError(f"there is no file {self.path}") from error
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror or error}") from error
        if self.size is not None and len(found) < self.size:
            raise DataError(f"{self.path} ends inside {self.name}: it is cut short")
        return found

    def size_in_pixels(self) -> tuple[int, int]:
        """Height and width of the image in it.

        Raises:
            DataError: it is not there, or no image that can be read.
        """
        return size_of(self.path if self.size is None else self.bytes())

    def pixels(self, geometry: Geometry) -> Pixels:
        """The image in it as the encoder takes it.

        Raises:
            DataError: it is not there, or no image that can be read.
        """
        if self.size is None:
            return read_pixels(self.path, geometry)
        return pixels_of(self.bytes(), f"{self.name} of {self.path}", geometry)


@attrs.frozen
class Frame:
    """The frame of a video that is shown `time` seconds after its first one.

    Attributes:
        height, width: in pixels; 0 where the video cannot be read.
    """

    clip: Blob
    time: float
    height: int = 0
    width: int = 0

    def __str__(self) -> str:
        return f"{self.clip.name} at {self.time:g} s"


@attrs.frozen(kw_only=True)
class Footage:
    """Frames of a video that an encoder sees together.

    Attributes:
        clip: the video. times: of the frames, in seconds after its first one, rising.
        seconds: that each of them stands for.
        height, width: in pixels; 0 where the video cannot be read.
    """

    clip: Blob
    times: tuple[float, ...]
    seconds: float
    height: int = 0
    width: int = 0

    def __str__(self) -> str:
        frames = counted(len(self.times), "frame")
        return f"{self.clip.name}, {frames} from {self.times[0]:g} to {self.times[-1]:g} s"

    def pixels(self, geometry: Geometry) -> ClipPixels:
        """The frames as the encoder takes them.

        Raises:
            DataError: they cannot be read.
        """
        from forge_vlm.data.video import read_clip

        return read_clip(self, geometry)


def measure(picture: Any) -> tuple[int, int]:
    """Height and width of a picture in pixels.

    Raises:
        DataError: it cannot be read.
    """
    if isinstance(picture, Frame | Footage):
        if not picture.height:
            raise DataError(f"the video {picture.clip} cannot be read")
        return picture.height, picture.width
    found: tuple[int, int] = picture.size_in_pixels()
    return found


def pixels_of(content: bytes, name: str, geometry: Geometry) -> Pixels:
    """The image in `content`, which messages call `name`."""
    try:
        return read_pixels(content, geometry)
    except DataError as error:
        raise DataError(error.message.replace("an image in memory", name), error.hint) from error


def by_file(pictures: Sequence[Any]) -> Iterator[list[Any]]:
    """Frames of one video that follow one another, as long as their times rise, together, and every other
    picture alone."""
    group: list[Any] = []
    for each in pictures:
        last = group[-1] if group else None
        if not (
            isinstance(each, Frame)
            and isinstance(last, Frame)
            and each.clip == last.clip
            and each.time > last.time
        ):
            if group:
                yield group
            group = []
        group.append(each)
    if group:
        yield group


def read_together(pictures: Sequence[Any], geometry: Geometry) -> Sequence[Shown]:
    """The pixels of one group of `by_file`; a picture that is neither a file nor a frame has `pixels`, too.

    Raises:
        DataError: one of them cannot be read.
    """
    if isinstance(pictures[0], Frame):
        from forge_vlm.data.video import read_frames

        return read_frames(pictures[0].clip, [each.time for each in pictures], geometry)
    return [each.pixels(geometry) for each in pictures]
