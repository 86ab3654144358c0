"""The turns of ring attention: what goes from rank to rank, and which blocks a rank makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from forge_core.parallel.blocks import PLAIN, Block, Kernel, merge
from forge_core.parallel.flash import FLASH, takes
from forge_core.parallel.pieces import pieces_of, places_of


class Rule(NamedTuple):
    """Who sees whom: no later key, and otherwise as here.

    Attributes:
        documents: (B, S) integers of the whole sequence; a query sees keys of its own. None: one a row.
        bounds: (N + 1,) int32, see `Block`; of this rank's tokens, for CUDA.
        seen: (B or 1, S / cp, S) bool, the whole rule for the queries of this rank; None: as the others say.
        window: keys that a query sees, itself included; None: all.
    """

    documents: Tensor | None = None
    bounds: Tensor | None = None
    seen: Tensor | None = None
    window: int | None = None


class Ring:
    """The context ranks in a circle, seen from this one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def source(self, turn: int) -> int:
        """Whose keys this rank holds in a turn."""
        return (self.rank - turn) % self.size

    def pass_on(self, tensor: Tensor) -> Passing:
        """Begin to send a tensor to the next rank, and to receive its like from the one before."""
        came = torch.empty_like(tensor)
        following, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=self.group, group_peer=following),
                dist.P2POp(dist.irecv, came, group=self.group, group_peer=before),
            ]
        )
        return Passing(tensor, came, work)


def ring_of(name: str) -> Ring:
    """The ring over the process group of this name."""
    groups: Any = dist.distributed_c10d
    return Ring(groups._resolve_process_group(name))


class Passing(NamedTuple):
    """A tensor on its way, and the one that comes instead; both are kept until they have arrived."""

    sent: Tensor
    came: Tensor
    work: list[Any]

    def wait(self) -> Tensor:
        """What came."""
        for each in self.work:
            each.wait()
        return self.came


class Turns:
    """The blocks that the queries of one rank make with the keys of each.

    Args:
        ring: of the context ranks.
        length: S / cp, tokens of each.
        scale, softcap: see `Block`.
    """

    def __init__(
        self, ring: Ring, rule: Rule, length: int, device: torch.device, scale: float, softcap: float | None
    ) -> None:
        self.ring, self.rule, self.length, self.device = ring, rule, length, device
        self.scale, self.softcap = scale, softcap
        self.queries = places_of(length * ring.size, ring.size, ring.rank, device)

    def blocks(self, source: int) -> Iterator[tuple[slice, slice, Block]]:
        """Slices of this rank's queries and of the keys of rank `source`, and what the ones see of the
        others; nothing for queries and keys that a comparison of their places rules out."""
        whole, half = slice(0, self.length), self.length // 2
        rule, rank = self.rule, self.ring.rank
        keys = places_of(self.length * self.ring.size, self.ring.size, source, self.device)
        if rule.seen is not None:
            parts = [(whole, whole, False)]
        elif rule.window is not None:
            parts = list(self._near(source, rule.window))
        elif source == rank:
            parts = [(whole, whole, True)]
        elif source < rank:  # its first piece comes before both of ours, its second after
            parts = [(whole, slice(0, half), False)]
        else:  # both of its pieces come before our second, and after our first
            parts = [(slice(half, self.length), whole, False)]
        for mine, theirs, causal in parts:
            yield mine, theirs, self._block(self.queries[mine], keys[theirs], mine, causal)

    def _near(self, source: int, window: int) -> Iterator[tuple[slice, slice, bool]]:
        """Pairs of pieces of which some key is not after, and within the window of, some query."""
        total, size, half = self.length * self.ring.size, self.ring.size, self.length // 2
        for i, (first, last) in enumerate(pieces_of(total, size, self.ring.rank)):
            for j, (start, end) in enumerate(pieces_of(total, size, source)):
                if start < last and first - (end - 1) < window:
                    causal = start == first
                    yield slice(i * half, (i + 1) * half), slice(j * half, (j + 1) * half), causal

    def _block(self, queries: Tensor, keys: Tensor, mine: slice, causal: bool) -> Block:
        rule = self.rule
        plain = Block(queries, keys, self.scale, self.softcap)
        if rule.seen is not None:
            return plain._replace(seen=rule.seen[:, mine][:, :, keys])
        block = plain._replace(causal=causal, window=rule.window, bounds=rule.bounds)
        if rule.documents is None:
            return block
        return block._replace(
            query_documents=rule.documents[:, queries], key_documents=rule.documents[:, keys]
        )

    def forward(self, source: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Add to `out` (B, S / cp, heads, E) and `lse` (B, S / cp, heads), in place, what the queries find at
        rank `source`.

        Args:
            q: (B, S / cp, heads, D). k: (B, S / cp, kv_heads, D), v: (B, S / cp, kv_heads, E) of that rank.
        """
        kernel = self.kernel(q, v)
        for mine, theirs, block in self.blocks(source):
            part = kernel.forward(q[:, mine], k[:, theirs], v[:, theirs], block)
            merge(out[:, mine], lse[:, mine], *part)

    def backward(self, source: int, given: tuple[Tensor, ...], dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add to the gradients, in place, what comes from the keys of rank `source`.

        Args:
            given: gradient of the output, q, k, v, output, log-sum-exp, laid out as in `forward`.
        """
        grad, q, k, v, out, lse = given
        kernel = self.kernel(q, v)
        for mine, theirs, block in self.blocks(source):
            keys, rest = (k[:, theirs], v[:, theirs]), (out[:, mine], lse[:, mine])
            parts = kernel.backward(grad[:, mine], q[:, mine], *keys, *rest, block)
            for total, place, part in ((dq, mine, parts[0]), (dk, theirs, parts[1]), (dv, theirs, parts[2])):
                total[:, place] += part

    def kernel(self, q: Tensor, v: Tensor) -> Kernel:
        """The flash kernel where it can do all blocks."""
        rule = self.rule
        plain = rule.seen is None and rule.window is None and self.softcap is None
        return FLASH if plain and takes(q, v) else PLAIN
