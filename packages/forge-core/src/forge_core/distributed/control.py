"""The one small reduction over all ranks that a step makes: counts, and what all ranks must decide alike."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from forge_core.distributed.mesh import remembered
from forge_core.errors import ForgeError

if TYPE_CHECKING:
    from forge_core.distributed.mesh import Mesh
    from forge_core.loop.signals import StopSignal


class Control:
    """Sums of whole numbers over all ranks, on a group of its own on the CPU: the device is not waited for.

    Args:
        mesh: of this process; every rank makes its control at the same time.
        stop: the flag that signals set on this rank; it travels with every reduction.

    Attributes:
        group: gloo, over all ranks; for other small exchanges on the CPU that all ranks make alike.
        waited: seconds spent waiting for other ranks so far.
        step: the last step whose counts were reduced.
    """

    def __init__(self, mesh: Mesh, stop: StopSignal) -> None:
        self.mesh, self.stop = mesh, stop
        self.group: dist.ProcessGroup = remembered("control", lambda: dist.new_group(backend="gloo"))
        self.waited = 0.0
        self.step = 0

    def counts(self, totals: Mapping[str, int], step: int) -> dict[str, int]:
        """What `totals` add up to over all ranks, each sample counted once, in the order of the names.

        Called once a step by every rank, with the same names. A stop asked for on any rank before this is
        known to all ranks after it.

        Raises:
            ForgeError: the ranks are at different steps.
        """
        names = sorted(totals)
        mine = [totals[name] for name in names] if self.mesh.counts_data else [0] * len(names)
        self.step = step
        steps, *sums = self._reduce([step, *mine])
        if steps != step * self.mesh.world_size:
            raise ForgeError(
                f"rank {self.mesh.world_rank} is at step {step}, others are not",
                "a step function must make the same updates on every rank",
            )
        return dict(zip(names, sums, strict=True))

    def check_stop(self) -> bool:
        """Whether any rank was asked to stop; the same answer on every rank, which all must ask for."""
        self._reduce([])
        return bool(self.stop)

    def same(self, text: str) -> str:
        """Rank 0's text, on every rank; all must ask."""
        content = bytearray(text.encode()) or bytearray(1)
        length = torch.tensor([len(content) if text else 0])
        dist.broadcast(length, 0, group=self.group)
        size = int(length)
        if not size:
            return ""
        mine = self.mesh.world_rank == 0
        tensor = (
            torch.frombuffer(content, dtype=torch.uint8) if mine else torch.empty(size, dtype=torch.uint8)
        )
        dist.broadcast(tensor, 0, group=self.group)
        return bytes(tensor.tolist()).decode()

    def alike(self, text: str) -> bool:
        """Whether all ranks have this text; the same answer on all, which all must ask for."""
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        ends = torch.tensor([digest, -digest])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.group)
        largest, smallest = ends.tolist()
        return bool(largest == -smallest)

    def texts(self, text: str) -> list[str]:
        """The text of every rank, by rank, on every rank; all must ask."""
        content = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.mesh.world_size)]
        dist.all_gather(lengths, torch.tensor([len(content)]), group=self.group)
        longest = max(1, *(int(length) for length in lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(content)] = content
        found = [torch.zeros_like(padded) for _ in lengths]
        dist.all_gather(found, padded, group=self.group)
        return [bytes(t[: int(n)].tolist()).decode() for t, n in zip(found, lengths, strict=True)]

    def _reduce(self, values: list[int]) -> list[int]:
        flags = self.stop.flags()
        vector = torch.tensor([*flags, *values], dtype=torch.int64)
        begin = time.perf_counter()
        dist.all_reduce(vector, group=self.group)
        self.waited += time.perf_counter() - begin
        found: list[int] = vector.tolist()
        self.stop.agree(found[: len(flags)])
        return found[len(flags) :]
