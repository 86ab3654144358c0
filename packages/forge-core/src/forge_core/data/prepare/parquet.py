"""Reads a column of Parquet files, row group by row group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from forge_core.data.prepare.job import Input, Job, Part, Unit, find_inputs, gather
from forge_core.data.prepare.jsonl import missing_field
from forge_core.data.prepare.readers import PARQUET
from forge_core.errors import DataError, ForgeError

_ROWS = 1024


def _parquet(path: str) -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ForgeError(f"{path} needs the package 'pyarrow'", "pip install pyarrow") from error
    try:
        return pq.ParquetFile(path)
    except Exception as error:  # pyarrow raises its own kinds for every way a file can be broken
        raise DataError(f"{path} is no Parquet file, or cut short: {error}", "copy it again") from error


def find(sources: Sequence[str], job: Job) -> list[Input]:
    return find_inputs(sources, PARQUET)


def cut(inputs: Sequence[Input], job: Job, shard_size: int) -> list[Unit]:
    parts = []
    for found in inputs:
        metadata = _parquet(found.path).metadata
        first = held = 0
        for group in range(metadata.num_row_groups):
            size = metadata.row_group(group).total_byte_size
            if held and held + size > shard_size:
                parts.append((Part(found.path, first, group), held))
                first, held = group, 0
            held += size
        if held:
            parts.append((Part(found.path, first, metadata.num_row_groups), held))
    return gather(parts, shard_size)


def rows(part: Part, job: Job) -> Iterator[tuple[int, Any]]:
    """Column `job.field`; the number is that of the row in its file."""
    file = _parquet(part.path)
    if job.field not in file.schema_arrow.names:
        raise missing_field(part.path, job.field, file.schema_arrow.names)
    groups = range(part.start, part.stop)
    number = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
    try:
        for batch in file.iter_batches(_ROWS, row_groups=list(groups), columns=[job.field]):
            for value in batch.column(0).to_pylist():
                yield number, value
                number += 1
    except OSError as error:
        raise DataError(f"{part.path} cannot be read: {error}", "copy it again") from error


def where(path: str, number: int) -> str:
    return f"{path} row {number}"
