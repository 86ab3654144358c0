"""Checkpoints in an object store, through fsspec. Objects cannot be renamed as a folder: the manifest, put
last, is what makes a checkpoint exist. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import xxhash

from forge_ckpt.errors import CheckpointError, DamagedError, RequestError
from forge_ckpt.layout import FOLDER, LATEST, MANIFEST, step_name, step_of
from forge_ckpt.manifest import FileSum
from forge_ckpt.store import PIECE, Buffer, Store

T = TypeVar("T")


class ObjectStore:
    """Checkpoints under an address that fsspec knows.

    Raises:
        CheckpointError: fsspec, or what it needs for this kind of address, is not installed.
        RequestError: fsspec knows no such address.
    """

    maps = False

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            import fsspec  # type: ignore[import-untyped]
        except ImportError as error:
            raise CheckpointError(
                f"{url} needs fsspec, which is not installed", "pip install 'forge-ckpt[fsspec]'"
            ) from error
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise CheckpointError(f"{url} cannot be used: {error}", "pip install what it names") from error
        except ValueError as error:
            kinds = "a folder, or an address that fsspec knows, such as s3://bucket/place"
            raise RequestError(f"{url} cannot be used: {error}", kinds) from error

    def where(self, name: str) -> str:
        return f"{self.url}/{name}"

    def names(self) -> list[str]:
        self.fs.invalidate_cache()
        try:
            found = self._call(lambda: self.fs.ls(self.root, detail=False))
        except FileNotFoundError:
            return []
        names = {str(path).rstrip("/").rpartition("/")[2] for path in found}
        return sorted((n for n in names if step_of(n) is not None), key=lambda n: step_of(n) or 0)

    def latest(self) -> str | None:
        try:
            return bytes(self._call(lambda: self.fs.cat_file(f"{self.root}/{LATEST}"))).decode().strip()
        except FileNotFoundError:
            return None

    def read(self, name: str, path: str) -> bytes:
        try:
            return bytes(self._call(lambda: self.fs.cat_file(self._path(name, path))))
        except FileNotFoundError as error:
            raise DamagedError(f"{self.where(name)}/{path} is missing", path) from error

    def buffer(self, name: str, path: str) -> memoryview:
        return memoryview(bytearray(self.read(name, path)))

    def size(self, name: str, path: str) -> int | None:
        try:
            return int(self._call(lambda: self.fs.size(self._path(name, path))))
        except FileNotFoundError:
            return None

    def begin(self, step: int, token: str) -> str:
        name = step_name(step)
        if self.size(name, MANIFEST) is not None:  # of an abandoned branch: from here on it is not whole
            with suppress(FileNotFoundError):  # every rank begins: another one was faster
                self._call(lambda: self.fs.rm_file(self._path(name, MANIFEST)))
        return name

    def write(self, name: str, path: str, parts: Sequence[Buffer]) -> FileSum:
        return self._call(lambda: self._write(self._path(name, path), parts))

    def _write(self, path: str, parts: Sequence[Buffer]) -> FileSum:
        state, size = xxhash.xxh3_128(), 0
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self.fs.open(path, "wb") as file:
            for part in parts:
                view = memoryview(part).cast("B")
                for begin in range(0, len(view), PIECE):
                    piece = view[begin : begin + PIECE]
                    state.update(piece)
                    size += len(piece)
                    file.write(piece)
        return FileSum(size, state.hexdigest())

    def commit(self, step: int, token: str, manifest: bytes) -> str:
        name = step_name(step)
        self._call(lambda: self.fs.pipe_file(self._path(name, MANIFEST), manifest))
        self._call(lambda: self.fs.pipe_file(f"{self.root}/{LATEST}", name.encode()))
        return name

    def final_name(self, step: int) -> str:
        return step_name(step)

    def discard(self, step: int, token: str) -> None:
        try:
            self.remove(step_name(step))
        except (OSError, CheckpointError):
            return  # it has no manifest, so it is no checkpoint; the next start removes it

    def remove(self, name: str) -> None:
        if self.size(name, MANIFEST) is not None:
            self._call(lambda: self.fs.rm_file(self._path(name, MANIFEST)))
        self._call(lambda: self.fs.rm(f"{self.root}/{name}", recursive=True))

    def clean(self) -> list[str]:
        left = [name for name in self.names() if self.size(name, MANIFEST) is None]
        for name in left:
            self.remove(name)
        return left

    def _path(self, name: str, path: str) -> str:
        return f"{self.root}/{name}/{path}"

    def _call(self, action: Callable[[], T]) -> T:
        """Do it; what clients raise beside a missing object becomes one kind of error."""
        try:
            return action()
        except FileNotFoundError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{self.url} cannot be used: {text}") from error


def find_objects(url: str) -> tuple[Store, str | None]:
    """The store at an address, and the name of the checkpoint if it is that of one.

    Raises:
        CheckpointError: there are no checkpoints.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    if step_of(name) is not None:
        store: Any = ObjectStore(parent)
        if name in store.names():
            return store, name
        raise RequestError(f"there is no checkpoint {url}")
    for place in (url, f"{url.rstrip('/')}/{FOLDER}"):
        store = ObjectStore(place)
        if store.names():
            return store, None
    raise RequestError(f"there are no checkpoints in {url}")
