"""Reads lines of JSON, plain (cut between lines) or compressed (a file as a whole)."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from forge_core.data.corpus import unreadable
from forge_core.data.prepare.job import Input, Job, Part, Unit, find_inputs, gather
from forge_core.data.prepare.readers import JSONL
from forge_core.errors import DataError, ForgeError

_SHOWN = 6


def find(sources: Sequence[str], job: Job) -> list[Input]:
    return find_inputs(sources, JSONL)


def cut(inputs: Sequence[Input], job: Job, shard_size: int) -> list[Unit]:
    parts = []
    for found in inputs:
        if found.path.endswith((".gz", ".zst")):
            parts.append((Part(found.path), found.size))
            continue
        for start in range(0, found.size, shard_size):
            stop = min(start + shard_size, found.size)
            parts.append((Part(found.path, start, stop), stop - start))
    return gather(parts, shard_size)


def rows(part: Part, job: Job) -> Iterator[tuple[int, Any]]:
    """Field `job.field` of the lines that start inside the part; empty lines are none. The number is that of
    the line's first byte, in a compressed file that of the line."""
    try:
        with _open(part.path) as file:
            for number, line in _lines(file, part):
                if line.strip():
                    yield number, _field(part.path, number, line, job.field)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{part.path} is cut short or damaged: {error}", "copy it again") from error
    except OSError as error:
        raise unreadable(part.path, error) from error


def where(path: str, number: int) -> str:
    """FILE:LINE."""
    if path.endswith((".gz", ".zst")):
        return f"{path}:{number}"
    line = 1
    with Path(path).open("rb") as file:
        while number > 0 and (chunk := file.read(min(number, 1 << 20))):
            line += chunk.count(b"\n")
            number -= len(chunk)
    return f"{path}:{line}"


def _open(path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return io.BufferedReader(gzip.open(path, "rb"))
    if not path.endswith(".zst"):
        return Path(path).open("rb")
    try:
        import zstandard
    except ImportError as error:
        raise ForgeError(f"{path} needs the package 'zstandard'", "pip install zstandard") from error
    return io.BufferedReader(zstandard.open(path, "rb"))


def _lines(file: IO[bytes], part: Part) -> Iterator[tuple[int, bytes]]:
    if part.stop < 0:
        yield from enumerate(file, 1)
        return
    at = part.start
    if at:
        file.seek(at - 1)
        at += len(file.readline()) - 1  # a line belongs to the part that it starts in
    while at < part.stop and (line := file.readline()):
        yield at, line
        at += len(line)


def _field(path: str, number: int, line: bytes, field: str) -> Any:
    if b"\0" in line:
        raise no_text(path)
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise no_text(path) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where(path, number)}: not a line of JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where(path, number)}: not an object of JSON, but {type(row).__name__}")
    if field not in row:
        raise missing_field(where(path, number), field, list(row))
    return row[field]


def no_text(path: str) -> DataError:
    """The error for an archive, a picture and the like in the place of lines of JSON."""
    return DataError(
        f"{path} is no text, but lines of JSON are read here",
        f"files of {', '.join(JSONL[:3])}, also as .gz and .zst; data.source says what is read",
    )


def missing_field(place: str, field: str, have: Sequence[str]) -> DataError:
    """The error for a row or a file without the field."""
    there = ", ".join(have[:_SHOWN]) + (", ..." if len(have) > _SHOWN else "")
    hint = "name the one that is meant (field among the options of the source, --field of a command)"
    if field == "text" and "messages" in have:
        hint = 'for conversations set data.source = "chat", or --chat-template of a command; else ' + hint
    return DataError(f"{place}: no field {field!r}; there is: {there or 'nothing'}", hint)
