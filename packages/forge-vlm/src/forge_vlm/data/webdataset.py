"""The source `vlm/webdataset`: tar shards of images or videos with text. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forge_core.data.source import SourceSpec
from forge_core.errors import DataError
from forge_vlm.data.build import Origin, path_of, samples_of
from forge_vlm.data.clips import Looks, frames_or_mask
from forge_vlm.data.folder import record_of
from forge_vlm.data.frames import Sampler, sampler_of
from forge_vlm.data.keys import TEXTS, OddKeys
from forge_vlm.data.options import WebDatasetOptions
from forge_vlm.data.record import Found, Rejected, Writer, rejected
from forge_vlm.data.remembered import key_of
from forge_vlm.data.source import ImageTextSource, image_shape
from forge_vlm.data.tar import Group, Member, groups_of

_ANSWERS = {"answer", "answers", "caption", "messages", "conversations"}
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def build(spec: SourceSpec, options: WebDatasetOptions) -> ImageTextSource:
    """The samples of one split.

    Raises:
        DataError: no shard; one that is compressed, broken or cut short; samples with a name twice, or that
            lack text or images.
    """
    tars = shards_of(path_of(spec, "a tar, a folder of them, or a pattern"), spec.name)
    root = Path(os.path.commonpath([tar.parent for tar in tars]))
    key = key_of(spec, options, image_shape(spec), tars)
    with Looks(spec) as look:
        reader = _Reader(spec, options, look)
        origin = Origin(name=str(spec.path), root=root, key=key, passing=look.passing, keys=reader.keys)
        found = (sample for tar in tars for sample in reader.samples(tar))
        return samples_of(spec, options, found, origin)


def shards_of(path: Path, name: str) -> list[Path]:
    """The tars that a path names: itself, those of a folder, or of a pattern with `*`, `?`, `[...]` and
    ranges `{000..012}`; in order.

    Raises:
        DataError: there is none.
    """
    if path.is_dir():
        found = sorted(path.glob("*.tar"))
    elif path.is_file():
        found = [path]
    else:
        found = []
        for pattern in ranges(str(path)):
            root = Path(pattern).anchor or "."
            found += sorted(Path(root).glob(str(Path(pattern).relative_to(Path(pattern).anchor))))
        if _RANGE.search(str(path)) and len(found) < len(list(ranges(str(path)))):
            raise DataError(f"{name}: of the tars {path} there are only {len(found)}")
    if not found:
        raise DataError(f"{name}: there is no tar {path}{'/*.tar' if path.is_dir() else ''}")
    return found


def ranges(pattern: str) -> Iterator[str]:
    """A pattern for each number of its ranges `{000..012}`."""
    found = _RANGE.search(pattern)
    if found is None:
        yield pattern
        return
    first, last = found.groups()
    for number in range(int(first), int(last) + 1):
        yield from ranges(f"{pattern[: found.start()]}{number:0{len(first)}}{pattern[found.end() :]}")


class _Reader:
    def __init__(self, spec: SourceSpec, options: WebDatasetOptions, look: Looks) -> None:
        self.spec, self.options, self.look = spec, options, look
        self.writer = Writer.of(spec, options)
        self.sampler: Sampler | None = None
        self.keys = OddKeys(TEXTS)

    def samples(self, tar: Path) -> Iterator[Found | Rejected]:
        for group in groups_of(tar, self.spec):
            try:
                images, videos = self._members(group)
                record = _record(group)
                self.keys.look(f"{tar.name}/{group.key}", record)
            except DataError as error:
                yield rejected(self.options, _placed(error, tar, group))
                continue
            try:
                pictures = self._pictures(tar, group, images, videos)
            except DataError as error:
                raise _placed(error, tar, group) from error
            try:
                yield self.writer.found(f"{tar.name}/{group.key}", record, pictures)
            except DataError as error:
                yield rejected(self.options, _placed(error, tar, group))

    def _members(self, group: Group) -> tuple[list[Member], list[Member]]:
        """Images and videos.

        Raises:
            DataError: there is none, where that is not asked for.
        """
        images = [m for m in group.members if m.kind in self.options.image_suffixes]
        videos = [m for m in group.members if m.kind in self.options.video_suffixes]
        if not images and not videos and self.options.need_images:
            raise DataError(
                f"it has no image and no video, but {', '.join(m.suffix for m in group.members)}",
                "the keys image_suffixes and video_suffixes say what counts; need_images = false takes text",
            )
        return images, videos

    def _pictures(
        self, tar: Path, group: Group, images: Sequence[Member], videos: Sequence[Member]
    ) -> tuple[Any, ...]:
        found: list[Any] = [member.blob(tar, group.key) for member in images]
        for clip in (member.blob(tar, group.key) for member in videos):
            self.sampler = self.sampler or sampler_of(self.spec)
            found += frames_or_mask(clip, self.look, self.sampler, self.options.unreadable == "mask")
        return tuple(found)


def _placed(error: DataError, tar: Path, group: Group) -> DataError:
    found = DataError(f"{tar}: {group.key}: {error.message}", error.hint)
    found.__cause__ = error
    return found


def _record(group: Group) -> dict[str, Any]:
    """The text of a sample: its JSON, and where that has no answer its `.txt`."""
    texts = {member.suffix: member.text for member in group.members if member.text is not None}
    if not texts:
        raise DataError(
            f"it has no .json and no .txt, but {', '.join(member.suffix for member in group.members)}"
        )
    unknown = sorted(set(texts) - {"json", "txt"})
    record: dict[str, Any] = {}
    if "json" in texts:
        record = record_of(texts["json"] or "")
    if "txt" in texts and not _ANSWERS & set(record):
        record["answer"] = texts["txt"]
    if not record and unknown:
        raise DataError(f"its text is in {', '.join(unknown)}, and is looked for in .json and .txt")
    return record
