"""Blocks of attention by torch's flash kernel for sequences of many lengths, on CUDA.

Documents need no mask in it. Those of the queries' own tokens are sequences of their own; and of earlier
tokens only the document that goes on into the queries is seen, by those at their start.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core.parallel.blocks import Block, Kernel

WIDEST = 256
"""Largest width of a head that the kernel takes."""
LEAST = (8, 0)
"""Least compute capability of a device (Ampere)."""


def runs_on(device: torch.device) -> bool:
    """Whether torch has the kernel for a device."""
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= LEAST


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether the kernel can do these tensors (.., D) and (.., E)."""
    low = q.dtype in (torch.float16, torch.bfloat16)
    return low and runs_on(q.device) and q.shape[-1] % 8 == 0 and v.shape[-1] <= q.shape[-1] <= WIDEST


class Runs(NamedTuple):
    """A block as sequences: (N + 1,) int32 bounds among the queries (B * Q) and keys (B * K).

    `live_queries` (B, Q) and `live_keys` (B, K) bool: those that are in a sequence with the other kind; None:
    all.
    """

    queries: Tensor
    keys: Tensor
    live_queries: Tensor | None = None
    live_keys: Tensor | None = None


def runs_of(block: Block, rows: int) -> Runs:
    """The sequences of a block without mask, window and cap.

    Without documents each row is one. Where documents are runs of a number, those that queries share with
    earlier keys are one a row: the last of the keys, if the queries begin with it. Three sequences a row are
    made of it, so that their number needs no look at the device: the keys before, that document, the queries
    after.
    """
    queries, keys = len(block.queries), len(block.keys)
    device = block.queries.device
    if block.causal and block.bounds is not None:
        return Runs(block.bounds, block.bounds)
    starts = torch.arange(rows, device=device)[:, None]
    if block.query_documents is None or block.key_documents is None or block.causal:
        every = torch.arange(rows + 1, dtype=torch.int32, device=device)
        return Runs(every * queries, every * keys)
    first, last = block.query_documents[:, :1], block.key_documents[:, -1:]
    going_on = first == last
    live_queries = (block.query_documents == first) & going_on
    live_keys = (block.key_documents == last) & going_on
    several, none = live_queries.sum(1, keepdim=True), torch.zeros_like(starts)
    before = keys - live_keys.sum(1, keepdim=True)
    query_ends = torch.cat((none, several, none + queries), 1) + starts * queries
    key_ends = torch.cat((before, none + keys, none + keys), 1) + starts * keys
    return Runs(_bounds(query_ends), _bounds(key_ends), live_queries, live_keys)


def _bounds(ends: Tensor) -> Tensor:
    return F.pad(ends.flatten(), (1, 0)).to(torch.int32)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """See `forge_core.parallel.blocks.Forward`."""
    runs, width = runs_of(block, len(q)), v.shape[-1]
    out, lse, *_ = _operators()._flash_attention_forward(
        _flat(q),
        _flat(k),
        _flat(_padded(v, q)),
        runs.queries,
        runs.keys,
        q.shape[1],
        k.shape[1],
        0.0,
        block.causal,
        return_debug_mask=False,
        scale=block.scale,
    )
    out, lse = out.view(q.shape)[..., :width], lse.T.view(q.shape[:-1])
    if runs.live_queries is not None:
        dead = ~runs.live_queries[:, :, None]
        out = out.masked_fill(dead[..., None], 0.0)
        lse = lse.masked_fill(dead, float("-inf"))
    return out, lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """See `forge_core.parallel.blocks.Backward`."""
    runs, width = runs_of(block, len(q)), v.shape[-1]
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = _operators()._flash_attention_backward(
        _flat(_padded(grad, q)),
        _flat(q),
        _flat(k),
        _flat(_padded(v, q)),
        _flat(_padded(out, q)),
        lse.flatten(0, 1).T.contiguous(),
        runs.queries,
        runs.keys,
        q.shape[1],
        k.shape[1],
        0.0,
        block.causal,
        no_dropout,
        torch.empty(0, device=q.device),
        scale=block.scale,
    )
    dq, dk, dv = dq.view(q.shape), dk.view(k.shape), dv.view(k.shape)[..., :width]
    if runs.live_queries is not None and runs.live_keys is not None:
        dq = dq.masked_fill(~runs.live_queries[:, :, None, None], 0.0)
        dead = ~runs.live_keys[:, :, None, None]
        dk, dv = dk.masked_fill(dead, 0.0), dv.masked_fill(dead, 0.0)
    return dq, dk, dv


FLASH = Kernel(flash_forward, flash_backward)


def _operators() -> Any:
    return torch.ops.aten


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1).contiguous()


def _padded(x: Tensor, like: Tensor) -> Tensor:
    """The heads of x made as wide as those of `like`."""
    return F.pad(x, (0, like.shape[-1] - x.shape[-1])).to(like.dtype)
