"""Where checkpoints lie: folders of a file system here, objects of a bucket in `objects.py`.

A store knows names and bytes. It makes a checkpoint appear as a whole: written under another name, made
durable, then renamed. Importing it imports no torch.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import xxhash

from forge_ckpt.errors import CheckpointError, RequestError
from forge_ckpt.files import NewFile, check_access, map_bytes, sync_folder, unreadable
from forge_ckpt.layout import LATEST, MANIFEST, is_unfinished, replaced_name, saving_name, step_name, step_of
from forge_ckpt.manifest import FileSum

PIECE = 16 << 20
"""Bytes handed to the system at once; each piece is hashed while it is in the cache."""
DIRECT_FROM = 1 << 20
"""Bytes of a file from which on it is written past the system's cache."""

Buffer = bytes | bytearray | memoryview


class Store(Protocol):
    """The checkpoints of a run. Names are those of checkpoints, paths are relative to one.

    Attributes:
        maps: `buffer` reads nothing, and what it gives stays readable when the file is removed.
    """

    maps: bool

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

    def buffer(self, name: str, path: str) -> memoryview:
        """The bytes of a file, without reading what is not looked at, where that is possible."""
        ...

    def size(self, name: str, path: str) -> int | None:
        """Bytes of a file, None if there is none.

        Raises:
            CheckpointError: whether there is one cannot be told.
        """
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
        """Remove what dead saves left behind; their names.

        Raises:
            RequestError: no checkpoint can be saved or found there.
        """
        ...


class LocalStore:
    """Checkpoints in a folder of a file system that all ranks see.

    Args:
        folder: holds the checkpoints; made by the first save.
    """

    maps = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def where(self, name: str) -> Path:
        return self.folder / name

    def names(self) -> list[str]:
        try:
            found = [entry.name for entry in os.scandir(self.folder) if entry.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise cannot_use(self.folder, error) from error
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
            raise unreadable(self.folder / name / path, path, error) from error

    def buffer(self, name: str, path: str) -> memoryview:
        return map_bytes(self.folder / name / path, path)

    def size(self, name: str, path: str) -> int | None:
        try:
            return (self.folder / name / path).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:  # it may well be there
            raise unreadable(self.folder / name / path, path, error) from error

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
            aside, replaces = self.folder / replaced_name(step, token), os.path.lexists(final)
            if replaces:
                final.rename(aside)
            try:
                temporary.rename(final)
            except OSError:
                if replaces:
                    aside.rename(final)  # of the save that failed nothing is left, of this one everything
                raise
            sync_folder(self.folder)
            sync_folder(self.folder.parent)  # the first save made the folder itself
            self._point_latest(final.name, token)
            remove_any(aside)
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
        with suppress(FileNotFoundError):
            (aside / MANIFEST).unlink()  # what has one and is not replaced is put back by the next start
        shutil.rmtree(aside)

    def clean(self) -> list[str]:
        try:
            return self._clean() if self._is_there() else []
        except OSError as error:
            raise cannot_use(self.folder, error) from error

    def _is_there(self) -> bool:
        """Whether the folder is there; better an error now than at the first save."""
        if not self.folder.is_dir():
            if self.folder.exists():
                raise RequestError(f"{self.folder} is no folder, and checkpoints lie there", "move it away")
            if self.folder.parent.is_dir():
                check_access(self.folder.parent)
            return False
        check_access(self.folder)
        pointer = self.folder / LATEST
        if pointer.is_dir() and not pointer.is_symlink():
            hint = "remove it; where no step_... folder is a copy of it, rename it to one"
            raise RequestError(
                f"{pointer} is a folder and no link, as a copy that follows links makes it", hint
            )
        return True

    def _clean(self) -> list[str]:
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
                remove_any(self.folder / name)
        for link in self.folder.glob(f".{LATEST}_*"):
            with suppress(OSError):
                link.unlink()
        return [name for name in left if not os.path.lexists(self.folder / name)]


def remove_any(path: Path) -> None:
    """Remove a folder with all that is in it, a file or a link, as far as that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def write_file(path: Path, parts: Iterable[Buffer], *, direct: bool = True) -> FileSum:
    """Write a file and wait until it is on disk; size and checksum of what was handed over.

    Args:
        direct: write past the system's cache where parts are large and the file system knows how: what is not
            read again soon need not push out what is, and a copy of it costs time that training needs.

    Raises:
        OSError: a half-written file is removed.
    """
    views = [memoryview(part).cast("B") for part in parts]
    state, size = xxhash.xxh3_128(), sum(map(len, views))
    file = NewFile(path, direct=direct and size >= DIRECT_FROM)
    try:
        for view in views:
            for begin in range(0, len(view), PIECE):
                piece = view[begin : begin + PIECE]
                state.update(piece)
                file.write(piece)
        file.sync()
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    finally:
        file.close()
    return FileSum(size, state.hexdigest())


def cannot_write(path: Path | str, error: OSError) -> CheckpointError:
    """The error for a save that failed."""
    hint = "earlier checkpoints are as they were; "
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    hint += "free some space, or keep fewer" if full else "make the place writable, or set run.dir"
    return CheckpointError(f"cannot write the checkpoint {path}: {error.strerror or error}", hint)


def cannot_use(folder: Path, error: OSError) -> RequestError:
    """The error for a place where checkpoints can neither be found nor saved."""
    hint = "make it readable and writable for this user, or set checkpoint.url or run.dir"
    return RequestError(f"cannot use {folder}, where checkpoints lie: {error.strerror or error}", hint)
