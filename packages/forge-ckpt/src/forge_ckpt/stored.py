"""A checkpoint as files: what it consists of, whether it is whole, its texts. Imports no torch.

`reading.py` adds the tensors.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from forge_ckpt.errors import DamagedError, RemovedError, RequestError
from forge_ckpt.layout import CONFIG, FOLDER, LATEST, MANIFEST, STATE
from forge_ckpt.manifest import Manifest, checksum, parse_manifest
from forge_ckpt.store import LocalStore, Store
from forge_core.files import user_path

READERS = 4
"""Files that are compared with their checksums at a time."""


class StoredCheckpoint:
    """A checkpoint of a store.

    Raises:
        DamagedError: it has no manifest, or that cannot be read.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        if store.size(name, MANIFEST) is None:
            raise DamagedError(f"{store.where(name)} is not complete: it has no {MANIFEST}", MANIFEST)
        self.manifest: Manifest = parse_manifest(store.read(name, MANIFEST))
        self._data: dict[str, memoryview] = {}

    @property
    def where(self) -> Path | str:
        return self.store.where(self.name)

    @property
    def config_text(self) -> str:
        """The resolved configuration of the run that saved it, as TOML.

        Raises:
            DamagedError: it is missing or no TOML.
        """
        try:
            text = self.bytes(CONFIG).decode()
            tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{self.where}/{CONFIG} cannot be read: {error}", CONFIG) from error
        return text

    def state(self, path: str = STATE) -> dict[str, Any]:
        """One of the JSON files.

        Raises:
            DamagedError: it is missing or no JSON.
        """
        try:
            found: dict[str, Any] = json.loads(self.bytes(path))
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{self.where}/{path} cannot be read: {error}", path) from error
        return found

    def bytes(self, path: str) -> bytes:
        return self.data(path).tobytes()

    def data(self, path: str) -> memoryview:
        """The bytes of a file, kept for later reads.

        Raises:
            RemovedError: the whole checkpoint has gone since it was opened.
            DamagedError: the file cannot be read.
        """
        if path not in self._data:
            try:
                self._data[path] = self.store.buffer(self.name, path)
            except DamagedError as error:
                if self.store.size(self.name, MANIFEST) is None:
                    raise RemovedError(self.where, path) from error
                raise
        return self._data[path]

    def hold(self) -> None:
        """Keep every file readable should the checkpoint be removed, where that takes no reading.

        Raises:
            RemovedError, DamagedError: see `data`.
        """
        for path in self.manifest.files if self.store.maps else ():
            self.data(path)

    def problems(self) -> list[DamagedError]:
        """Files that are missing or of another size, or cannot be looked at. Reads no data."""
        found = []
        for path, entry in self.manifest.files.items():
            try:
                size = self.store.size(self.name, path)
            except DamagedError as error:
                found.append(error)
                continue
            if size is None:
                found.append(DamagedError(f"{self.where}/{path} is missing", path))
            elif size != entry.size:
                words = f"{self.where}/{path} has {size} bytes instead of {entry.size}"
                found.append(DamagedError(words, path))
        return found

    def verify(self, paths: Iterable[str] | None = None, *, keep: bool = True) -> list[DamagedError]:
        """Files whose bytes are not those that were written, by default of all.

        Args:
            keep: their bytes for later reads; of an object store they are in memory.
        """
        found = self.problems()
        bad = {error.file for error in found}
        left = [path for path in (self.manifest.files if paths is None else paths) if path not in bad]
        left.sort(key=lambda path: -self.manifest.files[path].size)
        with ThreadPoolExecutor(READERS) as pool:  # neither reading nor hashing holds the interpreter
            checked = pool.map(partial(self._check, keep=keep), left)
            return found + [error for error in checked if error is not None]

    def _check(self, path: str, keep: bool) -> DamagedError | None:
        try:
            data = self.data(path) if keep else self.store.buffer(self.name, path)
            same = checksum(data) == self.manifest.files[path].xxh3
        except DamagedError as error:
            return error
        if same:
            return None
        return DamagedError(f"{self.where}/{path} is damaged: its checksum is not that of the manifest", path)


def find_store(place: str | Path) -> tuple[Store, str | None]:
    """The store that a run folder, a folder of checkpoints, or one checkpoint belongs to, and which was
    meant.

    The name is None where no particular one was.

    Raises:
        RequestError: there is nothing of the kind, or it may not be read.
    """
    text = str(place)
    if "://" in text:
        from forge_ckpt.objects import find_objects

        return find_objects(text)
    try:
        return _find_folder(user_path(place))
    except OSError as error:
        raise RequestError(
            f"{place} cannot be read: {error.strerror or error}", "make it readable"
        ) from error


def _find_folder(path: Path) -> tuple[Store, str | None]:
    named_so = path.name.startswith("step_") and not (path / FOLDER).is_dir()  # a run may be called so, too
    if named_so or (path / MANIFEST).exists():
        if not path.is_dir():
            raise RequestError(f"there is no checkpoint {path}")
        real = path.parent / path.readlink() if path.is_symlink() else path
        return LocalStore(real.parent), real.name
    if path.name == LATEST and path.is_symlink():
        raise RequestError(f"{path} points to {path.readlink()}, which is not there")
    for folder in (path / FOLDER, path):
        store = LocalStore(folder)
        if store.names():
            return store, None
    raise RequestError(f"there are no checkpoints in {path}", "give a run folder or a step_... folder in it")


def complete(store: Store) -> list[StoredCheckpoint]:
    """Complete checkpoints, the one saved last first; whether their bytes are right is another question."""
    found = []
    for name in store.names():
        try:
            saved = StoredCheckpoint(store, name)
        except DamagedError:
            continue
        if not saved.problems():
            found.append(saved)
    return sorted(found, key=lambda s: (s.manifest.serial, s.manifest.step), reverse=True)
