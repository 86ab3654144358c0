"""Who writes what: torch's save planner over all ranks, its plans exchanged as JSON.

A tensor that several ranks hold whole is written by one of them, a sharded one by each rank its part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from forge_ckpt.comm import Control
from forge_ckpt.errors import CheckpointError
from forge_ckpt.index import Index, Part, part_key, tensor_info
from forge_ckpt.layout import rank_file
from forge_ckpt.manifest import checksum
from forge_ckpt.tensorfile import DTYPES, NAMES

KINDS = {"model": "weights", "optimizer": "optimizer", "extras": "extras"}
"""First part of a tensor's name -> the file it goes into."""


class Planner:
    """Plans saves, anew only where names, shapes or layout changed on some rank."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.agreed: str | None = None
        self.index, self.text = Index({}), b""

    def fingerprint(self, tensors: Mapping[str, Tensor]) -> str:
        """Of what this rank has to save; the local plan is kept for `plan`."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), is_coordinator=self.control.is_main)
        self.items = [_to_json(item) for item in planner.create_local_plan().items]
        return checksum(json.dumps(self.items).encode())

    def plan(self, prints: Sequence[str]) -> None:
        """Make the index of the whole checkpoint from every rank's plan; collective where `prints` are new.

        Args:
            prints: fingerprints by rank.

        Raises:
            CheckpointError: ranks disagree about a tensor.
        """
        together = " ".join(prints)
        if together == self.agreed:
            return
        plans = self.control.gather(self.items)
        answer = self.control.broadcast(_global_plan(plans) if self.control.is_main else None)
        if "error" in answer:
            raise CheckpointError(f"the ranks do not agree on what to save: {answer['error']}")
        self.index = Index({name: tensor_info(value) for name, value in answer["tensors"].items()})
        self.text = self.index.to_text().encode()
        self.agreed = together

    def mine(self) -> dict[str, list[tuple[str, Part]]]:
        """What this rank writes: file -> tensor names and parts."""
        found: dict[str, list[tuple[str, Part]]] = {}
        own = {rank_file(kind, self.control.rank) for kind in KINDS.values()}
        for name, info in self.index.tensors.items():
            for part in info.parts:
                if part.file in own:
                    found.setdefault(part.file, []).append((name, part))
        return found


def _global_plan(plans: Sequence[Sequence[Any]]) -> dict[str, Any]:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        merged, _ = planner.create_global_plan([SavePlan([_from_json(i) for i in plan]) for plan in plans])
    except (ValueError, AssertionError) as error:
        return {"error": str(error)}
    tensors: dict[str, Any] = {}
    for rank, plan in enumerate(merged):
        for item in plan.items:
            data = cast(TensorWriteData, item.tensor_data)
            name, shape = item.index.fqn, list(data.size)
            known = tensors.setdefault(name, [NAMES[data.properties.dtype], shape, []])
            sizes, offsets = list(data.chunk.sizes), list(data.chunk.offsets)
            if 0 in sizes and 0 not in shape:
                continue  # a rank beyond the end of a short tensor
            file = rank_file(KINDS[name.partition("/")[0]], rank)
            known[2].append([file, part_key(name, offsets, sizes, shape), offsets, sizes])
    return {"tensors": tensors}


def _to_json(item: WriteItem) -> list[Any]:
    data = item.tensor_data
    if data is None:
        raise TypeError(f"{item.index.fqn} is no tensor")
    dtype = data.properties.dtype
    if dtype not in NAMES:
        raise TypeError(f"{item.index.fqn}: tensors of {dtype} cannot be saved")
    shard = item.type is WriteItemType.SHARD
    chunk = data.chunk
    return [item.index.fqn, shard, NAMES[dtype], list(data.size), list(chunk.offsets), list(chunk.sizes)]


def _from_json(value: Sequence[Any]) -> WriteItem:
    name, shard, dtype, shape, offsets, sizes = value
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.SHARD if shard else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=chunk, properties=TensorProperties(dtype=DTYPES[dtype]), size=torch.Size(shape)
        ),
    )
