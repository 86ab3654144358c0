"""Sends between the ranks of a pipeline that do not wait."""

from __future__ import annotations

from collections import deque

import torch.distributed as dist
from torch import Tensor


class Outbox:
    """Keeps what is sent until it has arrived. Of a send on the CPU only a wait tells that it has, so the
    sends of a round are waited for some rounds later, when the others should long be past them.

    Args:
        group: the ranks of this pipeline.
        tag: keeps these sends apart from others between the same two ranks.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int = 0) -> None:
        self.group, self.tag = group, tag
        self._rounds: deque[list[tuple[dist.Work, Tensor]]] = deque()

    def begin(self, ahead: int) -> None:
        """A round begins; all but the last `ahead` before it have arrived when this returns."""
        self._wait(ahead)
        self._rounds.append([])

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send to a rank of the group, as a part of the round."""
        peer = dist.get_global_rank(self.group, rank)
        work = dist.isend(tensor, peer, group=self.group, tag=self.tag)
        assert work is not None
        self._rounds[-1].append((work, tensor))

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        self._wait(0)

    def _wait(self, ahead: int) -> None:
        while len(self._rounds) > ahead:
            for work, _ in self._rounds.popleft():
                work.wait()
