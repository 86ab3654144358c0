"""Messages between ranks while saving and loading: JSON over a gloo group, so that nothing is unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from forge_core.distributed.mesh import remembered


class Control:
    """All ranks of a run, on CPU. Every method is collective.

    Args:
        rank, size: of this process.
        group: a gloo group, None for one process.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size, self.group = rank, size, group

    @classmethod
    def new(cls, name: str, rank: int, size: int) -> Control:
        """A group of its own for each name. All ranks call it at the same point."""
        if size == 1 or not dist.is_initialized():
            return cls()
        return cls(rank, size, remembered(f"checkpoint {name}", lambda: dist.new_group(backend="gloo")))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank, on every rank."""
        if self.size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([mine.numel()]), group=self.group)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded, group=self.group)
        return [json.loads(t[: int(n)].numpy().tobytes()) for t, n in zip(found, lengths, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        if self.size == 1:
            return value
        data = bytearray(json.dumps(value).encode()) if self.is_main else bytearray()
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0, group=self.group)
        message = (
            torch.frombuffer(data, dtype=torch.uint8)
            if self.is_main
            else torch.empty(int(length), dtype=torch.uint8)
        )
        dist.broadcast(message, 0, group=self.group)
        return json.loads(message.numpy().tobytes())

    def close(self) -> None:
        """Let go of the group; not collective."""
        self.group = None
