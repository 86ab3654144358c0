"""Attention of some queries to some keys, as a part of a softmax over more keys.

A part is a pair: its own output, and the log of the sum of its exponentials, by which parts over other keys
are merged (online softmax; Milakov & Gimelshein 2018). Backwards each is computed again from the sum over all
keys (Dao et al. 2022, "FlashAttention", section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MOST_SCORES = 1 << 27
"""Scores that the plain kernel holds at a time: half a gigabyte in fp32."""


class Block(NamedTuple):
    """Which keys the Q queries see among the K keys, all of them where nothing here says otherwise.

    Attributes:
        queries, keys: (Q,), (K,) int64 places in the sequence, ascending.
        scale: of scores. softcap: see `forge_core.model.attend`.
        causal: queries and keys are the same tokens, and no key comes after its query; in other blocks all
            keys come before all queries, unless `seen` is given.
        window: a query sees keys fewer than so many places before it.
        query_documents, key_documents: (B, Q), (B, K); a query sees keys of its document.
        seen: (B or 1, Q, K) bool, the whole rule instead of the above.
        bounds: (N + 1,) int32, where the documents of a causal block begin and the last ends in (B * Q); only
            for kernels that ask for it.
    """

    queries: Tensor
    keys: Tensor
    scale: float
    softcap: float | None = None
    causal: bool = False
    window: int | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    seen: Tensor | None = None
    bounds: Tensor | None = None

    def mask(self, part: slice) -> Tensor | None:
        """(B or 1, 1, 1, q, K) bool for some of the queries; None: they see all keys."""
        if self.seen is not None:
            return self.seen[:, None, None, part]
        found: Tensor | None = None
        if self.causal or self.window is not None:
            back = self.queries[part, None] - self.keys
            found = back >= 0 if self.window is None else (back >= 0) & (back < self.window)
            found = found[None]
        if self.query_documents is not None and self.key_documents is not None:
            same = self.query_documents[:, part, None] == self.key_documents[:, None]
            found = same if found is None else found & same
        return None if found is None else found[:, None, None]


Forward = Callable[[Tensor, Tensor, Tensor, Block], tuple[Tensor, Tensor]]
"""q (B, Q, heads, D), k (B, K, kv_heads, D), v (B, K, kv_heads, E) and a block -> the part (B, Q, heads, E)
and its log-sum-exp (B, Q, heads), minus infinity where a query sees none of the keys."""
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Block], tuple[Tensor, Tensor, Tensor]]
"""Gradient of the output, q, k, v, the output and its log-sum-exp over all keys, a block -> gradients of q,
k and v from these keys."""


class Kernel(NamedTuple):
    """What computes one block, forwards and backwards."""

    forward: Forward
    backward: Backward


def exact(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: fp32, fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a part over further keys to `out` (B, Q, heads, E) and `lse` (B, Q, heads), in place."""
    total = torch.logaddexp(lse, part_lse)
    base = total.masked_fill(total.isneginf(), 0.0)  # a query that has seen nothing yet
    out.mul_((lse - base).exp()[..., None])
    out.addcmul_(part.to(out.dtype), (part_lse - base).exp()[..., None])
    lse.copy_(total)


def plain_forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """`Forward` by matrix products in `exact` precision, on any device."""
    keys, values = _keys(k), _keys(v)
    outs, sums = [], []
    for part in _parts(q, k):
        scores, _ = _scores(q[:, part], keys, block, part)
        lse = scores.logsumexp(-1)
        chances = (scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
        outs.append(_whole(chances @ values))
        sums.append(_whole(lse[..., None])[..., 0])
    return torch.cat(outs, 1), torch.cat(sums, 1)


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """`Backward` to `plain_forward`."""
    keys, values, groups = _keys(k), _keys(v), k.shape[2]
    queries: list[Tensor] = []
    key, value = torch.zeros_like(keys), torch.zeros_like(values)
    for part in _parts(q, k):
        scores, slope = _scores(q[:, part], keys, block, part)
        chances = (scores - _grouped(lse[:, part, :, None], groups)).exp()
        mine = _grouped(grad[:, part], groups)
        inner = (mine * _grouped(out[:, part], groups)).sum(-1, keepdim=True)
        value += (chances.mT @ mine).sum(2, keepdim=True)
        change = chances * (mine @ values.mT - inner) * block.scale
        change = change if slope is None else change * slope
        queries.append(_whole(change @ keys))
        key += (change.mT @ _grouped(q[:, part], groups)).sum(2, keepdim=True)
    return torch.cat(queries, 1), key[:, :, 0].transpose(1, 2), value[:, :, 0].transpose(1, 2)


PLAIN = Kernel(plain_forward, plain_backward)


def _scores(q: Tensor, keys: Tensor, block: Block, part: slice) -> tuple[Tensor, Tensor | None]:
    """(B, kv_heads, heads a key head, q, K), minus infinity where a key is not seen, and the slope of the
    cap."""
    scores, slope = (_grouped(q, keys.shape[1]) @ keys.mT) * block.scale, None
    if block.softcap is not None:
        bent = torch.tanh(scores / block.softcap)
        scores, slope = bent * block.softcap, 1.0 - bent.square()
    mask = block.mask(part)
    return (scores if mask is None else scores.masked_fill(~mask, float("-inf"))), slope


def _parts(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Slices of the queries, so that their scores stay under `MOST_SCORES`."""
    step = max(1, MOST_SCORES // (q.shape[0] * q.shape[2] * k.shape[1]))
    for first in range(0, q.shape[1], step):
        yield slice(first, min(first + step, q.shape[1]))


def _grouped(x: Tensor, groups: int) -> Tensor:
    """(B, Q, heads, D) -> (B, kv_heads, heads a key head, Q, D), exact."""
    rows, queries, heads, width = x.shape
    apart = x.reshape(rows, queries, groups, heads // groups, width)
    return apart.permute(0, 2, 3, 1, 4).to(exact(x.dtype))


def _whole(x: Tensor) -> Tensor:
    """The way back from `_grouped`, without its dtype."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _keys(x: Tensor) -> Tensor:
    """(B, K, kv_heads, D) -> (B, kv_heads, 1, K, D), exact."""
    return x.transpose(1, 2)[:, :, None].to(exact(x.dtype))
