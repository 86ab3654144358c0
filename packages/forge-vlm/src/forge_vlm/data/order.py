"""Images and videos of a text in the order in which it names them. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeVar

from forge_core.data.wording import counted
from forge_core.errors import DataError
from forge_vlm.data.picture import Footage, Frame, by_file

VIDEO = "<video>"
"""Stands for all frames of a video."""
T = TypeVar("T")


def in_order(
    texts: Sequence[str], images: Sequence[T], videos: Sequence[Sequence[T]], placeholder: str
) -> tuple[list[str], list[T]]:
    """Texts in which a placeholder stands for each picture alone, and the pictures as they come there.

    Args:
        texts: in their order; each `placeholder` stands for the next image, each `<video>` for the next
            video. Without any `<video>` the texts stay, and images come before videos.
        videos: the pictures of each.

    Raises:
        DataError: `<video>` stands there more or less often than there are videos.
    """
    count = sum(text.count(VIDEO) for text in texts)
    if not count:
        return list(texts), [*images, *(picture for video in videos for picture in video)]
    if count != len(videos):
        stand = counted(count, f"placeholder {VIDEO}", f"placeholders {VIDEO}")
        raise DataError(f"{stand} for {counted(len(videos), 'video')}")
    still, moving = iter(images), iter(videos)
    found: list[T] = []
    for name in re.findall(f"{re.escape(placeholder)}|{VIDEO}", "\0".join(texts)):
        # places that have no image are counted where each is looked for
        found += next(moving) if name == VIDEO else islice(still, 1)
    found += still
    sizes, changed = iter([len(video) for video in videos]), []
    for text in texts:
        parts = text.split(VIDEO)
        changed.append(parts[0] + "".join(placeholder * next(sizes) + part for part in parts[1:]))
    return changed, found


def apart(pictures: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
    """The images among pictures, and the videos, each as its frames or as the one clip that it is."""
    images: list[Any] = []
    videos: list[list[Any]] = []
    for group in by_file(pictures):
        if isinstance(group[0], Frame | Footage):
            videos.append(group)
        else:
            images += group
    return images, videos
