"""`index.json`: every tensor by its global name, and which part of it lies in which file. Imports torch.

The parts are planned and resharded by `torch.distributed.checkpoint`; only its storage, whose metadata is a
pickle, is replaced.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from forge_ckpt.errors import DamagedError
from forge_ckpt.layout import INDEX
from forge_ckpt.tensorfile import DTYPES, NAMES

FORMAT = 1
Offsets = tuple[int, ...]


@attrs.frozen
class Part:
    """A box of a tensor: where it begins and how large it is, and the file and key that hold it."""

    file: str
    key: str
    offsets: Offsets
    sizes: Offsets

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@attrs.frozen
class TensorInfo:
    """A whole tensor: dtype, global shape, its parts."""

    dtype: torch.dtype
    shape: Offsets
    parts: tuple[Part, ...]


@attrs.frozen
class Index:
    """All tensors of a checkpoint by name: `model/NAME`, `optimizer/OPTIMIZER/NAME/KEY`, `extras/...`."""

    tensors: Mapping[str, TensorInfo]

    def names(self, prefix: str) -> Iterator[str]:
        """Names under a prefix, without it."""
        return (name.removeprefix(prefix) for name in self.tensors if name.startswith(prefix))

    def files(self, names: Sequence[str] | None = None) -> set[str]:
        """Files that hold these tensors, by default all."""
        chosen = self.tensors if names is None else names
        return {part.file for name in chosen for part in self.tensors[name].parts}

    def to_text(self) -> str:
        body = {
            name: [
                NAMES[info.dtype],
                list(info.shape),
                [[p.file, p.key, p.offsets, p.sizes] for p in info.parts],
            ]
            for name, info in self.tensors.items()
        }
        return json.dumps({"format": FORMAT, "tensors": body}, separators=(",", ":")) + "\n"

    def metadata(self) -> Metadata:
        """What torch's load planner plans with."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=info.dtype),
                    size=torch.Size(info.shape),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in info.parts
                    ],
                )
                for name, info in self.tensors.items()
            }
        )


def parse_index(data: bytes) -> Index:
    """The index of a checkpoint.

    Raises:
        DamagedError: it is not one, or of a later format.
    """
    try:
        body = json.loads(data)
        if body["format"] > FORMAT:
            raise ValueError(f"format {body['format']}; this release reads up to {FORMAT}")
        return Index({name: tensor_info(value) for name, value in body["tensors"].items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{INDEX} cannot be read: {error}", INDEX) from error


def tensor_info(value: Sequence[Any]) -> TensorInfo:
    """What JSON says of a tensor: dtype, shape, and file, key, offsets and sizes of each part."""
    dtype, shape, parts = value
    return TensorInfo(
        DTYPES[dtype],
        tuple(shape),
        tuple(Part(file, key, tuple(offsets), tuple(sizes)) for file, key, offsets, sizes in parts),
    )


def part_key(name: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> str:
    """Key of a part in its file: the tensor's name, with the offsets where it is not the whole."""
    whole = tuple(sizes) == tuple(shape)
    return name if whole else f"{name}@{','.join(map(str, offsets))}"
