"""The source `vlm/images`: a JSONL file beside images and videos. Imports no torch."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forge_core.data.corpus import unreadable
from forge_core.data.source import SourceSpec
from forge_core.errors import DataError
from forge_vlm.data.build import Origin, path_of, samples_of
from forge_vlm.data.clips import Looks, frames_or_mask
from forge_vlm.data.frames import sampler_of
from forge_vlm.data.keys import OddKeys
from forge_vlm.data.options import ImagesOptions
from forge_vlm.data.picture import Blob
from forge_vlm.data.record import Found, Rejected, Writer, rejected
from forge_vlm.data.remembered import key_of
from forge_vlm.data.source import ImageTextSource, image_shape
from forge_vlm.data.stored import file_of

DEFAULT_FILE = "data.jsonl"
_BY = "its lines name them with image, images or video"


def build(spec: SourceSpec, options: ImagesOptions) -> ImageTextSource:
    """The samples of one split.

    Raises:
        DataError: no file, a line that is not right (with its number), images that are not there.
    """
    file = _file_of(spec)
    keys = OddKeys()
    with Looks(spec) as look:
        origin = Origin(
            name=str(file),
            root=file.parent,
            key=key_of(spec, options, image_shape(spec), [file]),
            pictures_by=_BY,
            where=partial(line_of, file),
            total=partial(_count_lines, file),
            passing=look.passing,
            keys=keys,
        )
        return samples_of(spec, options, read_lines(file, spec, options, look, keys), origin)


def _count_lines(file: Path) -> int:
    with file.open("rb") as content:
        return sum(part.count(b"\n") for part in iter(partial(content.read, 1 << 20), b""))


def read_lines(
    file: Path, spec: SourceSpec, options: ImagesOptions, look: Looks, keys: OddKeys
) -> Iterator[Found | Rejected]:
    """Name, parts and pictures of every sample; odd keys of lines are noted in `keys`."""
    writer, sampler = Writer.of(spec, options), None
    for number, line in _lines(file):
        name = f"line {number}"
        try:
            record = record_of(line)
            name = str(record.get("id") or name)
            keys.look(name, record)
            pictures: list[Any] = list(_images(record, file.parent))
            clips = _videos(record, file.parent)
        except DataError as error:
            yield rejected(options, _placed(error, file, number, name))
            continue
        try:
            for clip in clips:
                sampler = sampler or sampler_of(spec)
                pictures += frames_or_mask(clip, look, sampler, options.unreadable == "mask")
        except DataError as error:
            raise _placed(error, file, number, name) from error
        try:
            yield writer.found(name, record, tuple(pictures))
        except DataError as error:
            yield rejected(options, _placed(error, file, number, name))


def line_of(file: Path, name: str, pictures: Sequence[Any]) -> str:
    """FILE:LINE of a sample, and what else it is called; without the line where it is not found any more.

    Args:
        pictures: some of the sample, which tell it from others of its name.
    """
    wanted = {str(file_of(picture)) for picture in pictures}
    try:
        for number, line in _lines(file):
            record = record_of(line)
            there = {blob.name for of in (_images, _videos) for blob in of(record, file.parent)}
            if name == str(record.get("id") or f"line {number}") and wanted <= there:
                return _place(file, number, name)
    except DataError:
        pass  # the file has changed since it was read
    return f"{file}: {name}"


def _placed(error: DataError, file: Path, number: int, name: str) -> DataError:
    found = DataError(f"{_place(file, number, name)}: {error.message}", error.hint)
    found.__cause__ = error
    return found


def _place(file: Path, number: int, name: str) -> str:
    return f"{file}:{number}" + ("" if name == f"line {number}" else f": {name}")


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines that hold something, and their numbers.

    Raises:
        DataError: it cannot be read, or is no text.
    """
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if "\0" in line:
                    raise _no_text(file)
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise _no_text(file) from error
    except OSError as error:
        raise unreadable(file, error) from error


def _no_text(file: Path) -> DataError:
    hint = "its lines are JSON that names images; data.path is such a file, or a folder with data.jsonl"
    if tarfile.is_tarfile(file):
        hint = 'data.source = "vlm/webdataset" reads tars'
    return DataError(f"{file} is no text, but a JSONL file is read here", hint)


def record_of(text: str | bytes) -> dict[str, Any]:
    """An object of JSON.

    Raises:
        DataError: it is none.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError("not an object")
    return record


def _images(record: dict[str, Any], folder: Path) -> tuple[Blob, ...]:
    return _named(record, folder, "image")


def _videos(record: dict[str, Any], folder: Path) -> tuple[Blob, ...]:
    return _named(record, folder, "video")


def _named(record: dict[str, Any], folder: Path, key: str) -> tuple[Blob, ...]:
    """The files that a record names with `key`, or with its plural."""
    if record.get(key) is not None and record.get(f"{key}s") is not None:
        raise DataError(f"it has {key} and {key}s, of which only one can be meant")
    names = record.get(f"{key}s", record.get(key))
    names = [names] if isinstance(names, str) else names or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{key} is no path, or {key}s no list of paths")
    if any("\0" in name for name in names):
        raise DataError(f"{key} names a file with the character \\0, which no file can have")
    return tuple(Blob(folder / name, name) for name in names)


def _file_of(spec: SourceSpec) -> Path:
    path = path_of(spec, "a JSONL file or its folder")
    file = path / DEFAULT_FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{spec.name}: there is no file {file}")
    return file
