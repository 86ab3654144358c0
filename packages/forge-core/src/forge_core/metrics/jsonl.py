"""metrics.jsonl: one JSON object a line, `{"step": 10, "train/loss": 2.31, ...}`.

A step may have several lines (training, evaluation); of two values under one step and name the last is valid.
A number that is not finite is written as null, for JSON knows no NaN: null means that the value was NaN or
infinite.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge_core.errors import ForgeError
from forge_core.files import replace_file

HINT = "free some space, or set run.dir to another disk; the lines written so far are whole"


class JsonlWriter:
    """Appends records; each line is handed to the system whole before `write` returns.

    Opening drops a half line that a crash left at the end. When a write fails, the file is cut back to its
    last whole line.

    Raises:
        ForgeError: the file cannot be opened or written; names the file and the system's reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            self.length = self._whole_length()
        except OSError as error:
            raise _failure(path, error, "run.dir must be a folder that you may write to") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one record."""
        line = memoryview(record_line(step, metrics))
        try:
            while line:
                line = line[os.write(self.file, line) :]
        except OSError as error:
            # A disk that is full still lets a file shrink.
            with suppress(OSError):
                os.ftruncate(self.file, self.length)
                os.lseek(self.file, self.length, os.SEEK_SET)
            raise _failure(self.path, error, HINT) from error
        self.length = os.lseek(self.file, 0, os.SEEK_CUR)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self.file >= 0:
            with suppress(OSError):
                os.close(self.file)
            self.file = -1

    def _whole_length(self) -> int:
        """Length up to the last line end; the file is cut there."""
        size = position = os.lseek(self.file, 0, os.SEEK_END)
        while position > 0:
            begin = max(0, position - 65536)
            end = os.pread(self.file, position - begin, begin).rfind(b"\n")
            position = begin + end + 1
            if end >= 0:
                break
        if position != size:
            os.ftruncate(self.file, position)
        return os.lseek(self.file, position, os.SEEK_SET)


def record_line(step: int, metrics: Mapping[str, float]) -> bytes:
    """One line of the file, line end included."""
    record: dict[str, Any] = {"step": step}
    for name, value in metrics.items():
        number = value if isinstance(value, int) else float(value)
        record[name] = number if math.isfinite(number) else None
    return json.dumps(record, allow_nan=False, separators=(", ", ": ")).encode() + b"\n"


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file in its order. Skips what is not one: a torn last line, foreign text.

    Raises:
        ForgeError: the file cannot be read.
    """
    for _, record in _lines(path):
        yield record


def cut_back(path: Path, step: int) -> int:
    """Drop every record after `step`, for a run that goes on from there; the number of records dropped.

    Torn lines go too. The file is replaced as a whole or not at all; a missing file is left missing.

    Raises:
        ForgeError: the file cannot be read or replaced; it is then unchanged.
    """
    if not path.exists():
        return 0
    total = kept = 0
    whole: list[bytes] = []
    for line, record in _lines(path):
        total += 1
        if record["step"] <= step:
            kept += 1
            whole.append(line + b"\n")
    try:
        replace_file(path, b"".join(whole))
    except OSError as error:
        raise _failure(path, error, "free some space; the file is unchanged") from error
    return total - kept


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ForgeError(f"cannot read {path}: {error.strerror}") from error
    # What follows the last line end was not finished, even where it happens to parse.
    for line in content.split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record


def _failure(path: Path, error: OSError, hint: str) -> ForgeError:
    return ForgeError(f"cannot write {path}: {error.strerror or error}", hint)
