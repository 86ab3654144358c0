"""Looking into a checkpoint: what is in it, whether it is whole, its tensors. Needs no session.

saved = open_checkpoint("runs/mine")
for name in saved.index.names("model/"):
    weight = saved.tensor(f"model/{name}")
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from forge_ckpt.errors import CheckpointError, DamagedError, RequestError
from forge_ckpt.index import Index, Part, parse_index
from forge_ckpt.layout import CONFIG, FOLDER, INDEX, LATEST, MANIFEST, STATE
from forge_ckpt.manifest import FileSum, Manifest, checksum, parse_manifest
from forge_ckpt.store import LocalStore, Store
from forge_ckpt.tensorfile import Entry, read_entries, read_tensor


class SavedCheckpoint:
    """A checkpoint of a store.

    Raises:
        DamagedError: it has no manifest, or that cannot be read.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        if store.size(name, MANIFEST) is None:
            raise DamagedError(f"{store.where(name)} is not complete: it has no {MANIFEST}", MANIFEST)
        self.manifest: Manifest = parse_manifest(store.read(name, MANIFEST))
        self._index: Index | None = None
        self._buffers: dict[str, Tensor] = {}
        self._entries: dict[str, dict[str, Entry]] = {}

    @property
    def where(self) -> Path | str:
        return self.store.where(self.name)

    @property
    def index(self) -> Index:
        if self._index is None:
            self._index = parse_index(self.bytes(INDEX))
        return self._index

    @property
    def config_text(self) -> str:
        """The resolved configuration of the run that saved it, as TOML."""
        return self.bytes(CONFIG).decode()

    def state(self, path: str = STATE) -> dict[str, Any]:
        """One of the JSON files.

        Raises:
            DamagedError: it is missing or no JSON.
        """
        try:
            found: dict[str, Any] = json.loads(self.bytes(path))
        except ValueError as error:
            raise DamagedError(f"{self.where}/{path} cannot be read: {error}", path) from error
        return found

    def bytes(self, path: str) -> bytes:
        return self.buffer(path).numpy().tobytes()

    def buffer(self, path: str) -> Tensor:
        """The bytes of a file, (n,) uint8, kept for later reads."""
        if path not in self._buffers:
            self._buffers[path] = self.store.buffer(self.name, path)
        return self._buffers[path]

    def entries(self, path: str) -> Mapping[str, Entry]:
        """The tensors of one file."""
        if path not in self._entries:
            self._entries[path] = read_entries(self.buffer(path), path)
        return self._entries[path]

    def tensors(self, path: str) -> dict[str, Tensor]:
        """All tensors of one file, sharing memory with it."""
        return {key: read_tensor(self.buffer(path), entry) for key, entry in self.entries(path).items()}

    def part(self, part: Part) -> Tensor:
        """A part of a tensor, sharing memory with its file."""
        entry = self.entries(part.file).get(part.key)
        if entry is None or entry.shape != part.sizes:
            raise DamagedError(f"{self.where}/{part.file} does not hold {part.key}", part.file)
        return read_tensor(self.buffer(part.file), entry)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor by its name in the index; where it is one part, it shares memory with the file.

        Raises:
            KeyError: there is none of this name.
        """
        info = self.index.tensors[name]
        if len(info.parts) == 1 and info.parts[0].sizes == info.shape:
            return self.part(info.parts[0])
        whole = torch.empty(info.shape, dtype=info.dtype)
        for part in info.parts:
            box = tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))
            whole[box] = self.part(part)
        return whole

    def problems(self) -> list[DamagedError]:
        """Files that are missing or of another size. Reads no data."""
        found = []
        for path, entry in self.manifest.files.items():
            size = self.store.size(self.name, path)
            if size is None:
                found.append(DamagedError(f"{self.where}/{path} is missing", path))
            elif size != entry.size:
                words = f"{self.where}/{path} has {size} bytes instead of {entry.size}"
                found.append(DamagedError(words, path))
        return found

    def verify(self, paths: Iterable[str] | None = None) -> list[DamagedError]:
        """Files whose bytes are not those that were written, by default of all."""
        found = self.problems()
        bad = {error.file for error in found}
        for path in self.manifest.files if paths is None else paths:
            if path not in bad:
                error = self._check(path, self.manifest.files[path])
                found += [] if error is None else [error]
        return found

    def _check(self, path: str, entry: FileSum) -> DamagedError | None:
        try:
            same = checksum(memoryview(cast(Any, self.buffer(path).numpy()))) == entry.xxh3
        except DamagedError as error:
            return error
        if same:
            return None
        return DamagedError(f"{self.where}/{path} is damaged: its checksum is not that of the manifest", path)


def load_into(saved: SavedCheckpoint, targets: Mapping[str, Tensor]) -> None:
    """Fill tensors, whole or sharded in whatever way, with what the checkpoint has under their names.

    Not collective: every rank reads what it needs, planned by torch's load planner.

    Raises:
        CheckpointError: a name is missing, or a shape differs.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    index = saved.index
    wanted = Index({name: index.tensors[name] for name in targets if name in index.tensors})
    try:
        planner.set_up_planner(dict(targets), wanted.metadata(), is_coordinator=False)
        plan = planner.create_local_plan()
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{saved.where} does not fit: {error}") from error
    places = {(name, part.offsets): part for name, info in wanted.tensors.items() for part in info.parts}
    with torch.no_grad():
        for item in plan.items:
            if 0 in item.lengths:
                continue
            offset = item.storage_index.offset
            part = places[item.storage_index.fqn, tuple(offset if offset is not None else ())]
            source = saved.part(part)
            for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, begin, length)
            planner.resolve_tensor(item).copy_(source)


def find_store(place: str | Path) -> tuple[Store, str | None]:
    """The store that a run folder, a folder of checkpoints, or one checkpoint belongs to, and which was
    meant.

    The name is None where no particular one was.

    Raises:
        CheckpointError: there is nothing of the kind.
    """
    text = str(place)
    if "://" in text:
        from forge_ckpt.objects import find_objects

        return find_objects(text)
    path = Path(place)
    if (path / MANIFEST).exists() or path.name.startswith("step_"):
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


def complete(store: Store) -> list[SavedCheckpoint]:
    """Complete checkpoints, the one saved last first; whether their bytes are right is another question."""
    found = []
    for name in store.names():
        try:
            saved = SavedCheckpoint(store, name)
        except DamagedError:
            continue
        if not saved.problems():
            found.append(saved)
    return sorted(found, key=lambda s: (s.manifest.serial, s.manifest.step), reverse=True)


def open_checkpoint(place: str | Path) -> SavedCheckpoint:
    """The checkpoint at a path, or the one saved last in a run folder. Its bytes are not verified.

    Raises:
        CheckpointError: there is none, or it is not complete.
    """
    store, name = find_store(place)
    if name is not None:
        saved = SavedCheckpoint(store, name)
        for problem in saved.problems():
            raise problem
        return saved
    for saved in complete(store):
        return saved
    raise CheckpointError(f"none of the checkpoints in {place} is complete")
