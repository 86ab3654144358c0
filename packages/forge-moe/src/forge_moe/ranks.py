"""The ranks that a layer of experts talks to: how tokens travel, over whom counts add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge_moe.dispatch import Permute, group
from forge_moe.experts import Experts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ExpertRanks:
    """The ranks that a layer talks to.

    Args:
        experts: ranks that divide the experts in order; None: each has all of them.
        context: ranks that have parts of the same sequences.
        data: groups that together make up all ranks with different tokens.
    """

    def __init__(
        self,
        experts: ProcessGroup | None = None,
        context: ProcessGroup | None = None,
        data: Sequence[ProcessGroup] = (),
    ) -> None:
        self.experts, self.context, self.data = experts, context, tuple(data)

    def over_context(self, counts: Tensor) -> Tensor:
        """Counts of whole sequences from those of this rank's parts."""
        return counts if self.context is None else summed(counts, [self.context])

    def over_data(self, counts: Tensor) -> Tensor:
        """Counts of the micro-batches of all ranks."""
        return summed(counts, self.data)

    def own(self, row: Tensor) -> Tensor:
        """What of (E, ...) belongs to the experts of this rank."""
        if self.experts is None:
            return row
        return row.chunk(self.experts.size())[self.experts.rank()]

    def run(self, experts: Experts, rows: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
        """What all experts give for this rank's rows, wherever they are.

        Args:
            rows: (A, D) in groups of experts, with those of no expert at the end.
            counts, ends: (E,) rows of each expert, and one past the last.

        Returns:
            (A, D); 0 for rows of no expert.
        """
        if self.experts is None:
            result: Tensor = experts(rows, ends)
            return result
        travelled: Tensor = travel(experts, rows, counts, self.experts)
        return travelled


@torch.compiler.disable  # type: ignore[untyped-decorator]
def travel(experts: Experts, rows: Tensor, counts: Tensor, ranks: ProcessGroup) -> Tensor:
    """Send rows to the ranks of their experts, run those, and send what they give back (GShard).

    The host waits once, for the numbers of rows; a rank without rows takes part like the others.
    """
    size, total = ranks.size(), rows.shape[0]
    sent = counts.view(size, -1)
    arriving = torch.empty_like(sent)
    dist.all_to_all_single(arriving, sent.contiguous(), group=ranks)
    sizes = torch.stack([sent.sum(1), arriving.sum(1)]).tolist()
    send, receive = sizes[0], sizes[1]
    inbox = _exchange(rows[: sum(send)], receive, send, ranks)
    local = sent.shape[1]
    expert = torch.arange(local, device=rows.device).repeat(size)
    groups = group(expert.repeat_interleave(arriving.reshape(-1), output_size=sum(receive)), local)
    sorted_rows = Permute.apply(inbox, groups.order, groups.place)  # type: ignore[no-untyped-call]
    given = Permute.apply(experts(sorted_rows, groups.ends), groups.place, groups.order)  # type: ignore[no-untyped-call]
    back = _exchange(given, send, receive, ranks)
    return torch.cat([back, back.new_zeros(total - len(back), back.shape[1])])


def _exchange(x: Tensor, out: list[int], into: list[int], group: ProcessGroup) -> Tensor:
    moved: Tensor = _AllToAll.apply(x, out, into, group)  # type: ignore[no-untyped-call]
    return moved


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks and theirs to this one; gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: list[int], into: list[int], group: ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (out, into), group
        result = x.new_empty(sum(out), x.shape[1])
        dist.all_to_all_single(result, x.contiguous(), out, into, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        out, into = ctx.sizes
        result = gradient.new_empty(sum(into), gradient.shape[1])
        dist.all_to_all_single(result, gradient.contiguous(), into, out, group=ctx.group)
        return result, None, None, None


def summed(counts: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    """A sum over all ranks of each group in turn."""
    total: Tensor = _summed(counts, groups)
    return total


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _summed(counts: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    total = counts.clone()
    for each in groups:
        dist.all_reduce(total, group=each)
    return total
