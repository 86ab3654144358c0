"""Reads a column of Hugging Face data sets of rows by number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from forge_core.data.hub import load_rows
from forge_core.data.prepare.job import Input, Job, Part, Unit, gather
from forge_core.data.prepare.jsonl import missing_field

_ROWS = 1024


@lru_cache(maxsize=4)
def _rows_of(path: str, job: Job) -> Any:
    return load_rows(path, dict(job.hf), job.cache_dir)


def find(sources: Sequence[str], job: Job) -> list[Input]:
    """A data set is one input; its time of change is a hash of the fingerprint that the library gives it."""
    found = []
    for source in sources:
        rows = _rows_of(source, job)
        changed = int.from_bytes(str(rows._fingerprint).encode()[:8], "little")
        found.append(Input(path=source, name=source, size=int(rows.data.nbytes), changed=changed))
    return found


def cut(inputs: Sequence[Input], job: Job, shard_size: int) -> list[Unit]:
    parts = []
    for found in inputs:
        count = len(_rows_of(found.path, job))
        step = max(1, count * shard_size // max(1, found.size))
        for start in range(0, count, step):
            stop = min(start + step, count)
            parts.append((Part(found.path, start, stop), found.size * (stop - start) // count))
    return gather(parts, shard_size)


def rows(part: Part, job: Job) -> Iterator[tuple[int, Any]]:
    """Column `job.field`."""
    found = _rows_of(part.path, job)
    if job.field not in found.column_names:
        raise missing_field(part.path, job.field, found.column_names)
    column = found.select_columns([job.field])
    for start in range(part.start, part.stop, _ROWS):
        values = column[start : min(start + _ROWS, part.stop)][job.field]
        yield from enumerate(values, start)


def where(path: str, number: int) -> str:
    return f"{path} row {number}"
