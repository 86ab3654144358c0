"""Looking into a checkpoint: its tensors. Needs no session.

saved = open_checkpoint("runs/mine")
for name in saved.index.names("model/"):
    weight = saved.tensor(f"model/{name}")
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from forge_ckpt.errors import CheckpointError, DamagedError
from forge_ckpt.index import Index, Part, parse_index
from forge_ckpt.layout import INDEX
from forge_ckpt.store import Store
from forge_ckpt.stored import StoredCheckpoint, complete, find_store
from forge_ckpt.tensorfile import Entry, as_tensor, read_entries, read_tensor

LOOKS = 100
"""At most so often a folder is looked at again in which checkpoints come and go."""


class SavedCheckpoint(StoredCheckpoint):
    """A checkpoint of a store, with its tensors.

    Raises:
        DamagedError: it has no manifest, or that cannot be read.
    """

    def __init__(self, store: Store, name: str) -> None:
        super().__init__(store, name)
        self._index: Index | None = None
        self._buffers: dict[str, Tensor] = {}
        self._entries: dict[str, dict[str, Entry]] = {}

    @property
    def index(self) -> Index:
        if self._index is None:
            self._index = parse_index(self.bytes(INDEX))
        return self._index

    def buffer(self, path: str) -> Tensor:
        """The bytes of a file, (n,) uint8, kept for later reads."""
        if path not in self._buffers:
            self._buffers[path] = as_tensor(self.data(path))
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


def open_checkpoint(place: str | Path) -> SavedCheckpoint:
    """The checkpoint at a path, or the one saved last in a run folder. Its bytes are not verified.

    A run may be saving there: what it removes before it is open is passed over for what it saved since, and
    what is open in a file system can be read to the end.

    Raises:
        CheckpointError: there is none, or it is not complete.
    """
    for _ in range(LOOKS):
        store, name = find_store(place)
        there = store.names()
        for each in [name] if name is not None else [found.name for found in complete(store)]:
            try:
                return _opened(store, each)
            except DamagedError:
                if name is not None and find_store(place)[1] == name:  # not `latest`, which has moved on
                    raise
        if name is None and store.names() == there:
            break
    raise CheckpointError(f"none of the checkpoints in {place} is complete")


def _opened(store: Store, name: str) -> SavedCheckpoint:
    saved = SavedCheckpoint(store, name)
    for problem in saved.problems():
        raise problem
    saved.hold()
    return saved
