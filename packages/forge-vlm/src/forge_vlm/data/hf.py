"""The source `vlm/hf`: Hugging Face data sets with columns of images. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from forge_core.data.hub import load_rows
from forge_core.data.source import SourceSpec
from forge_core.errors import DataError
from forge_vlm.data.build import Origin, samples_of
from forge_vlm.data.columns import PICTURES_BY, Columns, Content, classes_of, folder_of, keys_of
from forge_vlm.data.hf_stream import StreamedImages
from forge_vlm.data.options import HfImagesOptions
from forge_vlm.data.patches import looks_up
from forge_vlm.data.picture import Blob
from forge_vlm.data.pixels import Pixels
from forge_vlm.data.record import Found, Rejected, Writer, rejected
from forge_vlm.data.remembered import key_of
from forge_vlm.data.source import ImageTextSource, image_shape
from forge_vlm.data.stored import PictureCodec
from forge_vlm.geometry import Geometry

_ROWS, _FEW = 256, 16
_END = 256
"""Bytes at the end of an image that tell it from others."""


def build(spec: SourceSpec, options: HfImagesOptions) -> ImageTextSource | StreamedImages:
    """The samples of one split.

    Raises:
        DataError: the data set cannot be loaded or lacks columns, a row that is not right (with its number);
            a stream that is to be held out from or packed by best fit.
        ForgeError: the package `datasets` is not installed.
    """
    if spec.path is None:
        raise DataError(
            f"data.path: the source {spec.name!r} needs a folder, files or the name of a data set"
        )
    if options.streaming:
        return StreamedImages(spec, options)
    data = load_rows(spec.path, keys_of(options), spec.cache_dir)
    rows, shape = Rows(data, spec.path), image_shape(spec)
    columns = Columns.of(rows.columns, options, spec.path, rows.features, rows.first)
    # of files beside the data set nothing tells that their sizes have changed
    outside = looks_up(shape) and any(map(rows.beside, columns.images))
    files = [] if outside else [Path(each["filename"]) for each in data.cache_files]
    origin = Origin(
        name=spec.path,
        root=rows.folder,
        key=key_of(spec, options, shape, files, data._fingerprint) if files else None,
        codec=PictureCodec(rows.folder, rows.told, partial(Cell, rows)),
        pictures_by=PICTURES_BY,
        total=lambda: len(rows),
    )
    return samples_of(spec, options, _found(spec, options, rows, columns), origin)


class Rows:
    """A data set by number, without decoding its images.

    Args:
        data: a `datasets.Dataset`. path: of it.
    """

    def __init__(self, data: Any, path: str) -> None:
        self.columns: list[str] = list(data.column_names)
        self.features = data.features
        self.classes = classes_of(data.features)
        self.folder = folder_of(path)
        self._data = data.with_format("arrow")  # as stored: an image is its bytes, its path, or both
        self._last: tuple[int, dict[str, Any]] = (-1, {})

    def __len__(self) -> int:
        return len(self._data)

    def texts(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The rows of columns that hold no images."""
        chosen = self._data.select_columns(list(columns))
        for start in range(0, len(self), _ROWS):
            yield from chosen[start : start + _ROWS].to_pylist()

    def first(self, column: str) -> Any:
        """The first value of a column that is none of None and an empty list; None: there is none."""
        chosen = self._data.select_columns([column])
        for start in range(0, len(self), _FEW):
            for value in chosen[start : start + _FEW].column(column).to_pylist():
                if value is not None and value != []:
                    return value
        return None

    def beside(self, column: str) -> bool:
        """Whether the first image of a column is a file beside the data set."""
        value = self.first(column)
        value = value[0] if isinstance(value, list) else value
        return isinstance(Content.of(value, self.folder, "").value, Blob)

    def groups(self, column: str) -> Iterator[list[str]]:
        """What tells the images of each row of a column from others, without reading them whole: their paths,
        or their lengths and ends."""
        chosen = self._data.select_columns([column])
        for start in range(0, len(self), _ROWS):
            yield from groups_in(chosen[start : start + _ROWS].column(column))

    @staticmethod
    def told(cell: Cell) -> list[Any]:
        """What JSON has of a cell."""
        return [cell.row, cell.column, cell.place, cell.group]

    def image(self, row: int, column: str, place: int) -> Any:
        """What the data set has of one image."""
        if self._last[0] != row:
            self._last = row, self._data[row].to_pylist()[0]
        value = self._last[1][column]
        return value[place] if isinstance(value, list) else value


def groups_in(column: Any) -> Iterator[list[str]]:
    """See `Rows.groups`, of a column of arrow."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        counts = pc.fill_null(pc.list_value_length(array), 0).to_pylist()
        flat = pc.list_flatten(array)
    else:
        counts = [int(each) for each in pc.is_valid(array).to_pylist()]
        flat = array.drop_null()
    groups = iter(_groups(flat))
    for count in counts:
        yield [next(groups) for _ in range(count)]


def _groups(flat: Any) -> list[str]:
    import pyarrow as pa
    import pyarrow.compute as pc

    paths: list[Any] = [None] * len(flat)
    content = flat
    if pa.types.is_struct(flat.type) and flat.type.get_field_index("bytes") >= 0:
        if flat.type.get_field_index("path") >= 0:
            paths = pc.struct_field(flat, "path").to_pylist()
        content = pc.struct_field(flat, "bytes")
    elif pa.types.is_string(flat.type) or pa.types.is_large_string(flat.type):
        return [str(path) for path in flat.to_pylist()]
    if not (pa.types.is_binary(content.type) or pa.types.is_large_binary(content.type)):
        return [f"{value!r:.64}" for value in content.to_pylist()]  # no image, which reading it tells
    lengths = pc.binary_length(content).to_pylist()
    ends = pc.binary_slice(content, -_END).to_pylist()
    return [
        Path(path).name
        if length is None and path
        else f"{length}/{hashlib.blake2b(end or b'', digest_size=8).hexdigest()}"
        for path, length, end in zip(paths, lengths, ends, strict=True)
    ]


@attrs.frozen
class Cell:
    """An image of a data set. Those of one place are equal, so that the pieces of one are read together.

    Attributes:
        rows: the data set. row, column, place: where it is. group: see `Rows.groups`.
    """

    rows: Rows
    row: int
    column: str
    place: int
    group: str

    def __str__(self) -> str:
        return f"row {self.row} {self.column}" + (f" {self.place}" if self.place else "")

    @property
    def content(self) -> Content:
        """Read from the data set."""
        value = self.rows.image(self.row, self.column, self.place)
        return Content.of(value, self.rows.folder, str(self))

    def size_in_pixels(self) -> tuple[int, int]:
        """See `Content.size_in_pixels`."""
        return self.content.size_in_pixels()

    def pixels(self, geometry: Geometry) -> Pixels:
        """See `Content.pixels`."""
        return self.content.pixels(geometry)


def _found(
    spec: SourceSpec, options: HfImagesOptions, rows: Rows, columns: Columns
) -> Iterator[Found | Rejected]:
    writer = Writer.of(spec, options)
    grouped = [rows.groups(column) for column in columns.images]
    texts = rows.texts(tuple(columns.texts.values()))
    for number, (text, *groups) in enumerate(zip(texts, *grouped, strict=True)):
        cells = tuple(
            Cell(rows, number, column, place, group)
            for column, of_row in zip(columns.images, groups, strict=True)
            for place, group in enumerate(of_row)
        )
        try:
            yield writer.found(f"row {number}", columns.record(text, rows.classes), cells)
        except DataError as error:
            found = DataError(f"{spec.path} row {number}: {error.message}", error.hint)
            found.__cause__ = error
            yield rejected(options, found)
