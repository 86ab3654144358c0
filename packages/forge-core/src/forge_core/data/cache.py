"""What a source computes once: where it is kept, and how several processes share the work."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_core.errors import DataError, WriteError
from forge_core.files import replace_file, user_path

try:
    import fcntl
except ImportError:  # pragma: no cover - not a POSIX system
    fcntl = None  # type: ignore[assignment]

_POLL = 0.2
_TOLD_AFTER = 5.0
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_log = logging.getLogger("forge.data")


def cache_folder(cache_dir: str | None) -> Path:
    """`data.cache_dir`, or the user's own cache folder: $XDG_CACHE_HOME/forge, else ~/.cache/forge.

    Raises:
        DataError: neither is given, and this user has no home folder.
    """
    if cache_dir is not None:
        return user_path(cache_dir)
    folder = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if folder.parts[0].startswith("~"):
        raise DataError("this user has no home folder to keep prepared data in", "set data.cache_dir")
    return folder / "forge"


def make_folder(folder: Path) -> Path:
    """The folder, made if it is not there.

    Raises:
        DataError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        kind = WriteError if error.errno in _DISK else DataError
        hint = "choose another (--out, data.cache_dir)"
        raise kind(f"cannot make the folder {folder}: {error.strerror or error}", hint) from error
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path` exclusively among all processes that share its file system. Waits; the lock
    of a process that dies is free at once. Where the system has no file locks, nobody waits.

    Raises:
        DataError: the file cannot be made.
    """
    try:
        opened = path.open("a")
    except OSError as error:
        raise unwritable(path, error) from error
    with opened as file:
        if fcntl is not None:
            _wait_for(file.fileno(), path)
        yield


def _wait_for(file: int, path: Path) -> None:
    began, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                _log.warning("%s: no file locks here (%s); processes do not wait for each other", path, error)
                return
        if not told and time.monotonic() - began > _TOLD_AFTER:
            _log.warning("waiting for another process that prepares the same data (%s)", path)
            told = True
        time.sleep(_POLL)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_bytes(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """`replace_file` for data.

    Raises:
        DataError: it cannot be written.
    """
    try:
        replace_file(path, content)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> DataError:
    """The error for a file that cannot be written: a `WriteError` where the disk is at fault."""
    hint = "free some space, make the folder writable, or choose another (--out, data.cache_dir)"
    kind = WriteError if error.errno in _DISK else DataError
    return kind(f"cannot write {path}: {error.strerror or error}", hint)
