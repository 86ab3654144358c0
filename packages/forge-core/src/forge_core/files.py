"""Files that are there whole or not at all. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from forge_core.errors import Problem


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


def user_path(path: str | Path) -> Path:
    """A path as users write it: "~" and "~name" at its beginning are home folders, where these are known."""
    return Path(_expanded(path))


def home_problem(key: str, path: str | None) -> Iterator[Problem]:
    """A problem at `key` where a folder that is to be made begins with a home folder that nobody knows."""
    if path is not None and "://" not in path and _expanded(path).startswith("~"):
        home, *_ = path.split("/")
        yield Problem(key, f"no home folder {home} is known here", f"write the whole path, or ./{home}")


def _expanded(path: str | Path) -> str:
    # Path.expanduser raises where no home is known, and takes "./~" for one
    return os.path.expanduser(path)  # noqa: PTH111


def is_there(path: str) -> bool:
    """Whether there is a file or a folder, as far as this user can tell; "~" is the home folder."""
    try:
        return user_path(path).exists()
    except OSError:  # not to be looked at
        return True
