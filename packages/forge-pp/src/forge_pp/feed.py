"""Micro-batches for the ranks of a pipeline: the first reads, and hands the others what their stages use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_core.contract import Batch
from forge_core.distributed.mesh import remembered
from forge_core.loop.accumulate import totals_of
from forge_pp.outbox import Outbox
from forge_pp.window import Line

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

TAG = 1
"""Keeps what is sent here apart from what travels between stages of the same two ranks."""

Counts = dict[str, int]


class Feed:
    """The reading side of a pipeline.

    The rank that counts samples reads them. The sources of the others are never asked for one; they are
    handed what their stages use, and shapes of the rest. Their streams move on, so positions agree.

    Args:
        session: with its forward.
        line: the stages of this rank.
    """

    def __init__(self, session: TrainingSession, line: Line) -> None:
        self.session, self.line = session, line
        self.group = cpu_group(session, line)
        self.reads = self.group.rank() == 0
        self.unread = [unread_by(session, line, rank) for rank in range(self.group.size())]
        self.outbox = Outbox(self.group, TAG)

    def take(self) -> tuple[list[Batch], Counts]:
        """The micro-batches of an update, with their counts as the rank that reads has them.

        A stream that cannot `skip` is read by every rank.
        """
        session = self.session
        stream, count = session.stream, session.grad_accum_steps
        skip = getattr(stream, "skip", None)
        if skip is not None and not self.reads:
            skip(count)
            return self._receive()
        batches = stream.take(count)
        counts = totals_of(session, batches)
        if skip is not None:
            self._hand_out(batches, counts, ahead=0)
        return batches, counts

    def each(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Counts]]:
        """The batches of an evaluation, with their counts. All ranks go on to the same one."""
        if self.reads:
            ahead = self.group.size()
            for batch in batches:
                counts = totals_of(self.session, [batch])
                self._hand_out([batch], counts, ahead)
                yield batch, counts
            self._hand_out([], {}, ahead)
            return
        while True:
            found, counts = self._receive()
            if not found:
                return
            yield found[0], counts

    def _hand_out(self, batches: Sequence[Batch], counts: Counts, ahead: int) -> None:
        self.outbox.begin(ahead)
        for rank, unread in enumerate(self.unread[1:], start=1):
            head = json.dumps({"counts": counts, "batches": [_form(batch, unread) for batch in batches]})
            parts = [_bytes(v) for batch in batches for k, v in _tensors(batch).items() if k not in unread]
            text = torch.frombuffer(bytearray(head.encode()), dtype=torch.uint8)
            body = torch.cat(parts) if parts else text.new_empty(0)
            for tensor in (torch.tensor([len(text), len(body)]), text, body):
                if tensor.numel():
                    self.outbox.send(tensor, rank)

    def _receive(self) -> tuple[list[Batch], Counts]:
        sizes: list[int] = self._received(2, torch.int64).tolist()
        text, body = (self._received(size, torch.uint8) for size in sizes)
        head = json.loads(bytes(text.tolist()))
        at, batches = 0, []
        for form in head["batches"]:
            batch = dict(form["rest"])
            for name, kind, shape, sent in form["tensors"]:
                batch[name] = torch.empty(shape, dtype=getattr(torch, kind), device="meta")
                if sent:
                    end = at + batch[name].nbytes
                    batch[name] = body[at:end].clone().view(batch[name].dtype).view(shape)
                    at = end
            batches.append(batch)
        return batches, head["counts"]

    def _received(self, size: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(size, dtype=dtype)
        if size:
            dist.recv(tensor, dist.get_global_rank(self.group, 0), group=self.group, tag=TAG)
        return tensor


def unread_by(session: TrainingSession, line: Line, rank: int) -> frozenset[str]:
    """What no stage of a rank reads of a batch. Loss terms may read all of it, on any stage."""
    unread: Any = getattr(session.forward, "unread", None)
    if unread is None or session.loss_terms:
        return frozenset()
    stages = [stage for stage, owner in line.owners.items() if owner == rank]
    found = [frozenset(unread(first=s == 0, last=s == line.count - 1)) for s in stages]
    return frozenset.intersection(*found)


def cpu_group(session: TrainingSession, line: Line) -> dist.ProcessGroup:
    """The ranks of this pipeline as a group for tensors on the CPU."""
    if session.device.type == "cpu":
        return line.group
    root: Any = session.mesh.device_mesh
    pipelines = root.mesh.movedim(root.mesh_dim_names.index("pp"), -1).reshape(-1, line.group.size())

    def make() -> dist.ProcessGroup:
        mine, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            pipelines.tolist(), backend="gloo"
        )
        found: dist.ProcessGroup = mine
        return found

    return remembered("pipelines on the CPU", make)


def _tensors(batch: Batch) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if isinstance(value, Tensor)}


def _form(batch: Batch, unread: frozenset[str]) -> Mapping[str, Any]:
    """What a rank is told of a micro-batch: of its tensors name, type, shape and whether they follow."""
    tensors = [
        (name, str(value.dtype).removeprefix("torch."), list(value.shape), name not in unread)
        for name, value in _tensors(batch).items()
    ]
    return {"tensors": tensors, "rest": {k: v for k, v in batch.items() if not isinstance(v, Tensor)}}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
