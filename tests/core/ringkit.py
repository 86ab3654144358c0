"""Ring attention beside attention in one process. Its functions run in the workers of a pool."""

from __future__ import annotations

import math
import weakref
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from forge_core.model.documents import run_bounds, run_lengths
from forge_core.parallel import turns
from forge_core.parallel.pieces import places_of
from forge_core.parallel.ring import ring_attention
from forge_core.parallel.turns import Passing, Ring, Rule

CPU = torch.device("cpu")


def documents_of(rows: int, length: int) -> Tensor:
    """(rows, length) int32: one row of one document, one of many short ones, others between."""
    generator = torch.Generator().manual_seed(7)
    chances = torch.linspace(0.0, 0.6, rows)[:, None].expand(rows, length)
    return torch.bernoulli(chances, generator=generator).cumsum(1).to(torch.int32)


def seen_of(
    rows: int, length: int, documents: Tensor | None = None, window: int | None = None, free: bool = False
) -> Tensor:
    """(rows, length, length) bool, written out."""
    seen = torch.zeros(rows, length, length, dtype=torch.bool)
    for row in range(rows):
        for q in range(length):
            for k in range(length):
                near = k <= q and (window is None or q - k < window)
                both = free and q < 5 and k < 5
                together = documents is None or bool(documents[row, q] == documents[row, k])
                seen[row, q, k] = (near or both) and together
    return seen


def attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None, softcap: float | None = None
) -> Tensor:
    """softmax over seen keys, in the plainest way."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1) @ v


def tensors(length: int, kv_heads: int, width: int, rows: int = 3, heads: int = 4) -> list[Tensor]:
    """q, k, v and a gradient of the output, of the whole sequence, fp64."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(heads, 8), (kv_heads, 8), (kv_heads, width), (heads, width)]
    return [torch.randn(rows, h, length, d, generator=generator, dtype=torch.float64) for h, d in shapes]


def differences(
    length: int = 32,
    kv_heads: int = 4,
    width: int = 8,
    window: int | None = None,
    packed: bool = False,
    free: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> list[float]:
    """Largest differences of output and gradients of q, k and v on this rank from one process."""
    whole = tensors(length, kv_heads, width)
    documents = documents_of(3, length) if packed else None
    seen = seen_of(3, length, documents, window, free)
    inputs = [x.clone().requires_grad_() for x in whole[:3]]
    expected = attention(*inputs, seen, scale, softcap)
    expected.backward(whole[3])
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = places_of(length, size, rank, CPU)
    parts = [x[:, :, mine].clone().requires_grad_() for x in whole[:3]]
    rule = Rule(documents, None, None, window)
    if free:
        rule = Rule(seen=seen[:, mine])
    out = ring_attention(*parts, rule, dist.group.WORLD.group_name, scale, softcap)
    out.backward(whole[3][:, :, mine])
    pairs = [(out, expected), *((p.grad, x.grad) for p, x in zip(parts, inputs, strict=True))]
    return [float((a - b[:, :, mine]).abs().max()) for a, b in pairs]


class Watched(Ring):
    """A ring that keeps count of what it sends, and of the largest amount that it held at a time."""

    sent: ClassVar[list[int]] = []
    most: ClassVar[int] = 0
    _held: ClassVar[list[Any]] = []

    def pass_on(self, tensor: Tensor) -> Passing:
        passing = super().pass_on(tensor)
        Watched.sent.append(tensor.nbytes)
        Watched._held += [weakref.ref(tensor), weakref.ref(passing.came)]
        alive = {id(t): t.nbytes for ref in Watched._held if (t := ref()) is not None}
        Watched.most = max(Watched.most, sum(alive.values()))
        return passing


def traffic(local: int, backwards: bool) -> list[Any]:
    """Messages that this rank sends in one call of `local` tokens a rank, their bytes, and the most bytes
    held."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = places_of(local * size, size, rank, CPU)
    q, k, v, grad = (x[:, :, mine].requires_grad_() for x in tensors(local * size, 2, 8))
    Watched.sent, Watched.most, Watched._held = [], 0, []
    before, turns.Ring = turns.Ring, Watched  # type: ignore[misc]
    try:
        out = ring_attention(q, k, v, Rule(), dist.group.WORLD.group_name)
        forward = len(Watched.sent)
        if backwards:
            out.backward(grad)
    finally:
        turns.Ring = before  # type: ignore[misc]
    return [forward, Watched.sent, Watched.most]


def low() -> list[Any]:
    """Under autocast: the output's dtype, and how far it is from one process in double precision."""
    whole = tensors(16, 2, 8)
    expected = attention(*whole[:3], seen_of(3, 16))
    mine = places_of(16, dist.get_world_size(), dist.get_rank(), CPU)
    with torch.autocast("cpu", torch.bfloat16):
        parts = [x[:, :, mine].float() for x in whole[:3]]
        out = ring_attention(*parts, Rule(), dist.group.WORLD.group_name)
    return [str(out.dtype), float((out.double() - expected[:, :, mine]).abs().max())]


class Circle:
    """Stands for a `Ring` where nothing is sent."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def turns_of(rank: int, size: int, length: int, rule: Rule) -> turns.Turns:
    """The turns of a rank, with the bounds that a kernel for documents asks for."""
    mine = places_of(length, size, rank, CPU)
    if rule.documents is not None:
        rule = rule._replace(bounds=run_bounds(rule.documents[:, mine], len(run_lengths(rule.documents))))
    circle: Any = Circle(rank, size)
    return turns.Turns(circle, rule, length // size, CPU, 0.3, None)
