"""Files that are there whole or not at all. Imports no torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file whole or not at all, and durably: beside it under a name of this process, then renamed.

    Raises:
        OSError: it cannot be written; what was there before is unchanged.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def is_there(path: str) -> bool:
    """Whether there is a file or a folder, as far as this user can tell; "~" is the home folder."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError):  # not to be looked at, or no home folder is known
        return True
