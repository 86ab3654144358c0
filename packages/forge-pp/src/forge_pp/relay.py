"""Forward alone through the stages: for evaluation, generation and whoever calls the model as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_pp.outbox import Outbox
from forge_pp.window import Line


class Relay:
    """Hands what stages give from rank to rank, a micro-batch at a time.

    Sends do not wait, so that ranks with one stage work on several micro-batches at once. torch's schedules
    run windows, of at least as many micro-batches as they have stages; here any number comes, of any shape,
    down to the one of a generation.
    """

    def __init__(self, line: Line) -> None:
        self.line = line
        self.outbox = Outbox(line.group)

    def forward(
        self, travelling: Sequence[Tensor], run: Callable[[int, tuple[Tensor, ...] | None], Any]
    ) -> Any:
        """Run this rank's stages on one micro-batch.

        Args:
            travelling: what travels between stages, on the meta device.
            run: `run(stage, what came in)`: what goes out, or from the last stage the result.

        Returns:
            The result on the rank of the last stage, None elsewhere.
        """
        line, found = self.line, None
        self.outbox.begin(line.group.size())
        kept: tuple[Tensor, ...] | None = None
        for stage in sorted(line.parts):
            if stage and stage - 1 not in line.parts:
                kept = self._receive(travelling, line.owners[stage - 1])
            given = run(stage, kept if stage else None)
            if stage == line.count - 1:
                found = given
            elif stage + 1 in line.parts:
                kept = given
            else:
                self._send(given, line.owners[stage + 1])
        return found

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        self.outbox.finish()

    def from_last(self, tensor: Tensor) -> Tensor:
        """The tensor of the last stage's rank on every rank; all pass one of its shape."""
        tensor = tensor.contiguous()
        dist.broadcast(tensor, self._peer(self.line.owners[self.line.count - 1]), group=self.line.group)
        return tensor

    def _receive(self, travelling: Sequence[Tensor], owner: int) -> tuple[Tensor, ...]:
        device = self.line.device
        buffers = tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in travelling)
        for buffer in buffers:
            dist.recv(buffer, self._peer(owner), group=self.line.group)
        return buffers

    def _send(self, tensors: Sequence[Tensor], owner: int) -> None:
        for tensor in tensors:
            self.outbox.send(tensor.detach().contiguous(), owner)

    def _peer(self, rank: int) -> int:
        return dist.get_global_rank(self.line.group, rank)
