"""The source `vlm/images`: a JSONL file beside images. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from forge_core.data.chat import template_of
from forge_core.data.source import SourceSpec
from forge_core.errors import DataError
from forge_vlm.data.layout import Part, parts_of, pieces_of
from forge_vlm.data.options import ImagesOptions
from forge_vlm.data.pixels import Pixels, read_pixels
from forge_vlm.data.source import ImageTextSource, image_shape, laid_samples
from forge_vlm.data.video import Frame, frames_of, read_frame
from forge_vlm.geometry import ImageGeometry

DEFAULT_FILE = "data.jsonl"
_SCALE = 1 << 32
VIDEO = "<video>"
Picture = Path | Frame
Found = tuple[str, list[Part], tuple[Picture, ...]]


def build(spec: SourceSpec, options: ImagesOptions) -> ImageTextSource:
    """The samples of one split.

    What is held out is decided by the first image of a sample, or its text, so that questions about one image
    are on one side.

    Raises:
        DataError: no file, a line that is not right (with its number), images that are not there.
    """
    file = _file_of(spec)
    shape = image_shape(spec)
    found = [sample for sample in read_lines(file, spec, options) if _is_mine(spec, sample)]
    if options.unreadable == "error":
        _check_files(spec, found)
    samples = laid_samples(spec, shape, found, options.too_long)
    if not samples:
        raise DataError(f"{spec.name}: {file} leaves no sample for the split {spec.split}")
    paths = [path_of(picture) for _, _, images in found for picture in images]
    changed = [path.stat().st_mtime_ns if path.is_file() else 0 for path in paths]
    return ImageTextSource(
        spec,
        shape,
        samples,
        partial(read_picture, geometry=shape.geometry),
        about=repr((options, hashlib.blake2b(repr(changed).encode()).hexdigest())),
        pack=options.pack,
        mask_unreadable=options.unreadable == "mask",
    )


def read_lines(file: Path, spec: SourceSpec, options: ImagesOptions) -> Iterator[Found]:
    """Name, parts and image paths of every sample."""
    template = None if options.template == "none" else template_of(options.template, spec.tokenizer)
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = _record(line)
                images = _images(record, file.parent, options)
                pieces = pieces_of(record, template)
                frames = options.placeholder * len(images)
                pieces = [attrs.evolve(each, text=each.text.replace(VIDEO, frames)) for each in pieces]
                parts = parts_of(pieces, len(images), spec.tokenizer, options.placeholder)
            except DataError as error:
                raise DataError(f"{file}:{number}: {error.message}", error.hint) from error
            yield str(record.get("id") or f"line {number}"), parts, images


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError("not an object")
    return record


def _images(record: dict[str, Any], folder: Path, options: ImagesOptions) -> tuple[Picture, ...]:
    video = record.get("video")
    if isinstance(video, str):
        return _frames(folder / video, options)
    names = record.get("images", record.get("image", []))
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError("image is no path, or images no list of paths")
    return tuple(folder / name for name in names)


def _frames(path: Path, options: ImagesOptions) -> tuple[Picture, ...]:
    """Frames of a video; one that cannot be read is found out again when its sample is, and masked there."""
    try:
        return frames_of(path, fps=options.fps, least=options.min_frames, most=options.max_frames)
    except DataError:
        if options.unreadable == "error":
            raise
        return (Frame(path, 0.0),)


def read_picture(picture: Picture, geometry: ImageGeometry) -> Pixels:
    """The pixels of an image file or of a frame of a video."""
    return read_frame(picture, geometry) if isinstance(picture, Frame) else read_pixels(picture, geometry)


def path_of(picture: Picture) -> Path:
    """The file that it is in."""
    return picture.path if isinstance(picture, Frame) else picture


def _file_of(spec: SourceSpec) -> Path:
    if spec.path is None:
        raise DataError(f"data.path: the source {spec.name!r} needs the path of a JSONL file or its folder")
    path = Path(spec.path).expanduser()
    file = path / DEFAULT_FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{spec.name}: there is no file {file}")
    return file


def held_out(about: str, share: float) -> bool:
    """Whether what is called `about` belongs to the share kept for evaluation."""
    digest = hashlib.blake2b(about.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") < share * _SCALE


def _is_mine(spec: SourceSpec, sample: Found) -> bool:
    _, parts, images = sample
    about = path_of(images[0]).name if images else repr(parts)
    return spec.split == "all" or held_out(about, spec.holdout) == (spec.split == "holdout")


def _check_files(spec: SourceSpec, found: list[Found]) -> None:
    pairs = [(name, path_of(picture)) for name, _, images in found for picture in images]
    missing = [(name, path) for name, path in pairs if not path.is_file()]
    if missing:
        name, path = missing[0]
        raise DataError(
            f"{spec.name}: {len(missing)} images are not there, first {path} of {name}",
            'mend the paths, or set unreadable = "mask"',
        )
