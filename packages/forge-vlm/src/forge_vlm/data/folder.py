"""The source `vlm/images`: a JSONL file beside images and videos. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge_core.data.source import SourceSpec
from forge_core.errors import DataError
from forge_vlm.data.build import path_of, samples_of
from forge_vlm.data.clips import Looks, frames_or_mask
from forge_vlm.data.frames import sampler_of
from forge_vlm.data.options import ImagesOptions
from forge_vlm.data.picture import Blob
from forge_vlm.data.record import Found, Writer
from forge_vlm.data.source import ImageTextSource

DEFAULT_FILE = "data.jsonl"


def build(spec: SourceSpec, options: ImagesOptions) -> ImageTextSource:
    """The samples of one split.

    Raises:
        DataError: no file, a line that is not right (with its number), images that are not there.
    """
    file = _file_of(spec)
    with Looks(spec) as look:
        return samples_of(spec, options, read_lines(file, spec, options, look), str(file))


def read_lines(file: Path, spec: SourceSpec, options: ImagesOptions, look: Looks) -> Iterator[Found]:
    """Name, parts and pictures of every sample."""
    writer, sampler = Writer.of(spec, options), None
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            name = f"line {number}"
            try:
                record = record_of(line)
                name = str(record.get("id") or name)
                if isinstance(record.get("video"), str):
                    sampler = sampler or sampler_of(spec)
                    clip = Blob(file.parent / record["video"], record["video"])
                    mask = options.unreadable == "mask"
                    pictures: tuple[Any, ...] = frames_or_mask(clip, look, sampler, mask)
                else:
                    pictures = _images(record, file.parent)
                yield writer.found(name, record, pictures)
            except DataError as error:
                called = "" if name == f"line {number}" else f"{name}: "
                raise DataError(f"{file}:{number}: {called}{error.message}", error.hint) from error


def record_of(text: str | bytes) -> dict[str, Any]:
    """An object of JSON.

    Raises:
        DataError: it is none.
    """
    try:
        record = json.loads(text)
    except ValueError as error:
        raise DataError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError("not an object")
    return record


def _images(record: dict[str, Any], folder: Path) -> tuple[Blob, ...]:
    names = record.get("images", record.get("image", []))
    names = [names] if isinstance(names, str) else names or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError("image is no path, or images no list of paths")
    return tuple(Blob(folder / name, name) for name in names)


def _file_of(spec: SourceSpec) -> Path:
    path = path_of(spec, "a JSONL file or its folder")
    file = path / DEFAULT_FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{spec.name}: there is no file {file}")
    return file
