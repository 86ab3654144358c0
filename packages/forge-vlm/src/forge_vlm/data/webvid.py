"""The source `vlm/webvid`: CSV files of captions, and videos beside them. Imports no torch."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_core.data.corpus import unreadable
from forge_core.data.source import SourceSpec
from forge_core.errors import DataError
from forge_vlm.data.build import Origin, path_of, samples_of
from forge_vlm.data.clips import Looks, frames_or_mask
from forge_vlm.data.frames import sampler_of
from forge_vlm.data.options import WebVidOptions
from forge_vlm.data.picture import Blob
from forge_vlm.data.record import Found, Rejected, Writer, rejected
from forge_vlm.data.remembered import key_of
from forge_vlm.data.source import ImageTextSource, image_shape

Row = tuple[str, str, Blob]
"""Name, caption and video."""
_HINT = 'mend it, or set unreadable = "mask"'


def build(spec: SourceSpec, options: WebVidOptions) -> ImageTextSource:
    """The videos of one split.

    Raises:
        DataError: no CSV, columns that it lacks, a video that is not there or cannot be read where that is an
            error.
    """
    path = path_of(spec, "a CSV file or a folder of them")
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise DataError(f"{spec.name}: there is no CSV file {path}{'/*.csv' if path.is_dir() else ''}")
    rows = (row for file in files for row in read_rows(file, options))
    key = key_of(spec, options, image_shape(spec), files)
    with Looks(spec) as look:
        origin = Origin(name=str(path), root=files[0].parent, key=key, passing=look.passing)
        return samples_of(spec, options, _found(spec, options, rows, look), origin)


def read_rows(file: Path, options: WebVidOptions) -> Iterator[Row | Rejected]:
    """The rows of a CSV; of one that is shorter than the header the cells that it lacks are not there.

    Raises:
        DataError: it lacks a column, or is no text, or a row is not right; with file and line.
    """
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines, strict=True)
            for row in reader:
                there = {name: value for name, value in row.items() if value is not None}
                try:
                    caption, name = there[options.caption], options.videos.format_map(there)
                except (KeyError, IndexError, ValueError, AttributeError) as error:
                    column = str(error.args[0]) if error.args else "?"
                    found = _missing(f"{file}:{reader.line_num}", column, there)
                    if column not in row:
                        raise found from error
                    yield rejected(options, found)
                else:
                    yield there.get("videoid") or name, caption, Blob(file.parent / name, name)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} is no CSV file in UTF-8: {error}") from error
    except OSError as error:
        raise unreadable(file, error) from error


def _missing(place: str, column: str, row: Mapping[Any, Any]) -> DataError:
    there = ", ".join(name for name in row if name is not None)
    return DataError(
        f"{place}: there is no column {column!r}; there is: {there}",
        "the keys videos and caption of the source name the columns",
    )


def _found(
    spec: SourceSpec, options: WebVidOptions, rows: Iterable[Row | Rejected], look: Looks
) -> Iterator[Found | Rejected]:
    writer, sampler = Writer.of(spec, options), sampler_of(spec)
    for row in rows:
        if isinstance(row, Rejected):
            yield row
            continue
        name, caption, blob = row
        try:
            frames = frames_or_mask(blob, look, sampler, options.unreadable == "mask")
        except DataError as error:
            raise DataError(f"{spec.name}: {name}: {error.message}", error.hint or _HINT) from error
        try:
            yield writer.found(name, {"answer": caption}, frames)
        except DataError as error:
            yield rejected(options, DataError(f"{spec.name}: {name}: {error.message}", error.hint))
