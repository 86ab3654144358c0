"""Calls to the file system that stores share. Importing it imports no torch."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from forge_ckpt.errors import DamagedError

if TYPE_CHECKING:
    from torch import Tensor


BLOCK = 4096
"""What sizes, places in a file and addresses in memory are multiples of in a direct write."""
DIRECT: int = getattr(os, "O_DIRECT", 0)
CANNOT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What file systems say that have no direct writes."""


class NewFile:
    """A file that is written from its beginning to its end.

    Args:
        direct: past the system's cache, straight from the memory of this process, as long as the file system
            can and everything is a multiple of `BLOCK`; what follows goes through the cache.
    """

    def __init__(self, path: Path, *, direct: bool = False) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._direct = direct and bool(DIRECT)
        try:
            self._file = os.open(path, flags | (DIRECT if self._direct else 0), 0o644)
        except OSError as error:
            if not self._direct or error.errno not in CANNOT:
                raise
            self._direct = False
            self._file = os.open(path, flags, 0o644)

    def write(self, data: memoryview) -> None:
        """Append bytes, all of them."""
        whole = len(data) - len(data) % BLOCK
        while self._direct and whole:
            try:
                written = os.write(self._file, data[:whole])
            except OSError as error:
                if error.errno not in CANNOT:
                    raise
                break  # not from this address, or not here
            data, whole = data[written:], whole - written
        if data:
            self._through_cache()
            while data:
                data = data[os.write(self._file, data) :]

    def _through_cache(self) -> None:
        if self._direct:
            import fcntl

            self._direct = False
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~DIRECT)

    def sync(self) -> None:
        """Return when everything is on disk."""
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk; where the file system has no such call, nothing."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(file)


def check_access(folder: Path) -> None:
    """Raise PermissionError where this process may not list a folder, or add to it."""
    mine = os.access in os.supports_effective_ids
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=mine):
        may_read = os.access(folder, os.R_OK | os.X_OK, effective_ids=mine)
        raise PermissionError(errno.EACCES, f"this user may not {'write' if may_read else 'read'} there")


def map_bytes(path: Path, name: str) -> memoryview:
    """The bytes of a file, mapped: changes to them do not reach the file.

    Raises:
        DamagedError: it cannot be read.
    """
    try:
        try:
            mapped = _mapped(path)
        except OSError as error:
            if error.errno != errno.EMFILE or not _more_open_files():
                raise
            mapped = _mapped(path)
    except OSError as error:
        raise unreadable(path, name, error) from error
    if mapped is None:
        return memoryview(bytearray())
    if hasattr(mmap, "MADV_SEQUENTIAL"):
        mapped.madvise(mmap.MADV_SEQUENTIAL)  # it is not in the cache, and is read from end to end
    return memoryview(mapped)


def _mapped(path: Path) -> mmap.mmap | None:
    """None for an empty file, which cannot be mapped."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return None
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _more_open_files() -> bool:
    """Let this process open as many files as it may ask for; whether that is more than before.

    A mapped file counts as open, and each of hundreds of ranks wrote several.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True


def map_file(path: Path, name: str) -> Tensor:
    """The bytes of a file as (n,) uint8, mapped: changes to the tensor do not reach the file. Imports torch.

    Raises:
        DamagedError: it cannot be read.
    """
    from forge_ckpt.tensorfile import as_tensor

    return as_tensor(map_bytes(path, name))


def unreadable(path: Path, name: str, error: OSError) -> DamagedError:
    """The error for a file that is there and cannot be read; `name` is its path in the checkpoint."""
    return DamagedError(f"{path} cannot be read: {error.strerror or error}", name)
