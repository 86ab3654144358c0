"""Where checkpoints lie: folders of a file system here, objects of a bucket in `objects.py`.

A store knows names and bytes. It makes a checkpoint appear as a whole: written under another name, made
durable, then renamed.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from forge_ckpt.errors import CheckpointError, DamagedError, RequestError
from forge_ckpt.layout import LATEST, MANIFEST, is_unfinished, replaced_name, saving_name, step_name, step_of
from forge_ckpt.manifest import FileSum

PIECE = 16 << 20
"""Bytes handed to the system at once; each piece is hashed while it is in the cache."""

Buffer = bytes | bytearray | memoryview


class Store(Protocol):
    """The checkpoints of a run. Names are those of checkpoints, paths are relative to one."""

    def where(self, name: str) -> Path | str:
        """Full path or address of a checkpoint."""
        ...

    def names(self) -> list[str]:
        """Names of all checkpoints, complete or not, by step."""
        ...

    def latest(self) -> str | None:
        """The name that `latest` points to."""
        ...

    def read(self, name: str, path: str) -> bytes: ...

    def buffer(self, name: str, path: str) -> Tensor:
        """The bytes of a file as (n,) uint8, without reading what is not looked at, where that is
        possible.
        """
        ...

    def size(self, name: str, path: str) -> int | None:
        """Bytes of a file, None if there is none."""
        ...

    def begin(self, step: int, token: str) -> str:
        """Make room for a new checkpoint; the name under which its files are written."""
        ...

    def write(self, name: str, path: str, parts: Sequence[Buffer]) -> FileSum:
        """Write a file whole and durable; its size and checksum, taken of what was handed over."""
        ...

    def commit(self, step: int, token: str, manifest: bytes) -> str:
        """Write the manifest, make the checkpoint appear and point `latest` to it; its name."""
        ...

    def final_name(self, step: int) -> str:
        """The name that the checkpoint of an update gets."""
        ...

    def discard(self, step: int, token: str) -> None:
        """Remove what a failed save wrote."""
        ...

    def remove(self, name: str) -> None:
        """Remove a checkpoint. Raises OSError."""
        ...

    def clean(self) -> list[str]:
        """Remove what dead saves left behind; their names."""
        ...


class LocalStore:
    """Checkpoints in a folder of a file system that all ranks see.

    Args:
        folder: holds the checkpoints; made by the first save.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def where(self, name: str) -> Path:
        return self.folder / name

    def names(self) -> list[str]:
        try:
            found = [entry.name for entry in os.scandir(self.folder) if entry.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((n for n in found if step_of(n) is not None), key=lambda n: step_of(n) or 0)

    def latest(self) -> str | None:
        try:
            return (self.folder / LATEST).readlink().name
        except OSError:
            return None

    def read(self, name: str, path: str) -> bytes:
        try:
            return (self.folder / name / path).read_bytes()
        except OSError as error:
            raise _unreadable(self.folder / name / path, path, error) from error

    def buffer(self, name: str, path: str) -> Tensor:
        return map_file(self.folder / name / path, path)

    def size(self, name: str, path: str) -> int | None:
        try:
            return (self.folder / name / path).stat().st_size
        except OSError:
            return None

    def begin(self, step: int, token: str) -> str:
        name = saving_name(step, token)
        try:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        return name

    def write(self, name: str, path: str, parts: Sequence[Buffer]) -> FileSum:
        target = self.folder / name / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            return write_file(target, parts)
        except OSError as error:
            raise cannot_write(target, error) from error

    def commit(self, step: int, token: str, manifest: bytes) -> str:
        temporary, final = self.folder / saving_name(step, token), self.folder / step_name(step)
        self.write(temporary.name, MANIFEST, [manifest])
        try:
            for folder in [temporary, *(p for p in temporary.rglob("*") if p.is_dir())]:
                sync_folder(folder)
            aside = self.folder / replaced_name(step, token)
            if final.exists():
                final.rename(aside)
            temporary.rename(final)
            sync_folder(self.folder)
            sync_folder(self.folder.parent)  # the first save made the folder itself
            self._point_latest(final.name, token)
            shutil.rmtree(aside, ignore_errors=True)
        except OSError as error:
            raise cannot_write(final, error) from error
        return final.name

    def _point_latest(self, name: str, token: str) -> None:
        link = self.folder / f".{LATEST}_{token}"
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        link.replace(self.folder / LATEST)  # one rename: there is never no pointer
        sync_folder(self.folder)

    def final_name(self, step: int) -> str:
        return step_name(step)

    def discard(self, step: int, token: str) -> None:
        shutil.rmtree(self.folder / saving_name(step, token), ignore_errors=True)

    def remove(self, name: str) -> None:
        # first under a name that nobody loads from: a removal that is cut short leaves no half checkpoint
        aside = self.folder / replaced_name(step_of(name) or 0, os.urandom(4).hex())
        (self.folder / name).rename(aside)
        shutil.rmtree(aside)

    def clean(self) -> list[str]:
        if not self.folder.is_dir():
            if self.folder.exists():  # better now than at the first save
                raise RequestError(f"{self.folder} is no folder, and checkpoints lie there", "move it away")
            return []
        left = sorted(entry.name for entry in os.scandir(self.folder) if is_unfinished(entry.name))
        for name in left:
            step = name.split("_")[2]
            whole = self.folder / f"step_{step}"
            if (
                name.startswith(".replaced")
                and (self.folder / name / MANIFEST).exists()
                and not whole.exists()
            ):
                (self.folder / name).rename(whole)  # the save that was to replace it never came
            else:
                shutil.rmtree(self.folder / name, ignore_errors=True)
        for link in self.folder.glob(f".{LATEST}_*"):
            with suppress(OSError):
                link.unlink()
        return left


def write_file(path: Path, parts: Iterable[Buffer]) -> FileSum:
    """Write a file and wait until it is on disk; size and checksum of what was handed over.

    Raises:
        OSError: a half-written file is removed.
    """
    state, size = xxhash.xxh3_128(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for part in parts:
            view = memoryview(part).cast("B")
            for begin in range(0, len(view), PIECE):
                piece = view[begin : begin + PIECE]
                state.update(piece)
                size += len(piece)
                while piece:
                    piece = piece[os.write(file, piece) :]
        os.fsync(file)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(file)
    return FileSum(size, state.hexdigest())


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


def map_file(path: Path, name: str) -> Tensor:
    """The bytes of a file as (n,) uint8, mapped: changes to the tensor do not reach the file.

    Raises:
        DamagedError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return torch.empty(0, dtype=torch.uint8)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise _unreadable(path, name, error) from error
    return torch.frombuffer(mapped, dtype=torch.uint8)


def cannot_write(path: Path | str, error: OSError) -> CheckpointError:
    """The error for a save that failed."""
    hint = "earlier checkpoints are as they were; "
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    hint += "free some space, or keep fewer" if full else "make the place writable, or set run.dir"
    return CheckpointError(f"cannot write the checkpoint {path}: {error.strerror or error}", hint)


def _unreadable(path: Path, name: str, error: OSError) -> DamagedError:
    return DamagedError(f"{path} cannot be read: {error.strerror or error}", name)
