"""Ring attention: queries stay on their context rank, keys and values go round (Liu et al. 2023, "Ring
Attention with Blockwise Transformers for Near-Infinite Context").

In each of cp turns a rank holds the keys and values of one rank, while those of the next are on their way,
and adds what its queries find there (`Turns.forward`). Backwards keys and values go round once more, and
their gradients behind them, one turn longer, until they are home. A rank holds the keys and values of two
ranks at most, however many there are.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from forge_core.parallel.blocks import exact
from forge_core.parallel.turns import Passing, Rule, Turns, ring_of

OPERATOR = "forge::ring_attention"
_RULE = "Tensor? documents, Tensor? bounds, Tensor? seen, str group, int? window, float scale, float? softcap"


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule,
    group: str,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks. All ranks of the group call it alike.

    Args:
        q: (B, heads, S / cp, D). k: (B, kv_heads, S / cp, D), v: (B, kv_heads, S / cp, E); of this rank's
            tokens, two pieces of the sequence (`pieces_of`).
        rule: who sees whom.
        group: name of the process group of the context ranks.
        scale, softcap: see `forge_core.model.attend`.

    Returns:
        (B, heads, S / cp, E).
    """
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    documents, bounds, seen, window = rule
    out, _ = _attention(q, k, v, documents, bounds, seen, group, window, scale, softcap)
    result: Tensor = out
    return result


@torch.library.custom_op(
    OPERATOR,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_RULE}) -> (Tensor, Tensor)",
)
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    bounds: Tensor | None,
    seen: Tensor | None,
    group: str,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """The output (B, heads, S / cp, E) and the log-sum-exp (B, S / cp, heads) over all keys."""
    ring = ring_of(group)
    rule = Rule(documents, bounds, seen, window)
    turns = Turns(ring, rule, q.shape[2], q.device, scale, softcap)
    widths = [k.shape[-1], v.shape[-1]]
    with _plainly(q):
        q, held = q.transpose(1, 2), _together(k, v)
        out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=exact(q.dtype))
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=exact(q.dtype))
        for turn in range(ring.size):
            coming = ring.pass_on(held) if turn + 1 < ring.size else None
            keys, values = torch.split(held, widths, -1)
            turns.forward(ring.source(turn), q, keys, values, out, lse)
            del keys, values
            if coming is not None:
                held, coming = coming.wait(), None  # nothing holds on to what was sent
    return out.to(q.dtype).transpose(1, 2), lse


@torch.library.custom_op(
    f"{OPERATOR}_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_RULE}) -> (Tensor, Tensor, Tensor)",
)
def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    bounds: Tensor | None,
    seen: Tensor | None,
    group: str,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, shaped like them."""
    ring = ring_of(group)
    rule = Rule(documents, bounds, seen, window)
    turns = Turns(ring, rule, q.shape[2], q.device, scale, softcap)
    widths = [k.shape[-1], v.shape[-1]]
    with _plainly(q):
        grad, q, out, held = grad.transpose(1, 2), q.transpose(1, 2), out.transpose(1, 2), _together(k, v)
        dq = torch.zeros_like(q, dtype=exact(q.dtype), memory_format=torch.contiguous_format)
        behind: Passing | None = None
        for turn in range(ring.size):
            coming = ring.pass_on(held) if turn + 1 < ring.size else None
            found = torch.zeros_like(held, dtype=exact(held.dtype))
            dk, dv = torch.split(found, widths, -1)
            given = (grad, q, *torch.split(held, widths, -1), out, lse)
            turns.backward(ring.source(turn), given, dq, dk, dv)
            del given, dk, dv
            if behind is not None:  # what ranks before found for the keys held here
                found += behind.wait()
                behind = None
            behind = ring.pass_on(found)
            if coming is not None:
                held, coming = coming.wait(), None
        assert behind is not None
        dk, dv = torch.split(behind.wait().to(k.dtype), widths, -1)
    return dq.to(q.dtype).transpose(1, 2), dk.transpose(1, 2).clone(), dv.transpose(1, 2).clone()


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rule: Any) -> tuple[Tensor, Tensor]:
    rows, heads, length, _ = q.shape
    out = q.new_empty(rows, length, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(rows, length, heads, dtype=exact(q.dtype))


@_gradients.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rule: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, bounds, seen, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, documents, bounds, seen)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, documents, bounds, seen = ctx.saved_tensors
    found = _gradients(grad, q, k, v, out, lse, documents, bounds, seen, *ctx.rest)
    return (*found, *[None] * 7)


_attention.register_autograd(_backward, setup_context=_keep)


def _together(k: Tensor, v: Tensor) -> Tensor:
    """(B, S / cp, kv_heads, D + E): keys and values travel as one message."""
    return torch.cat((k.transpose(1, 2), v.transpose(1, 2)), -1).contiguous()


def _plainly(q: Tensor) -> contextlib.AbstractContextManager[None]:
    """Without autocast, which would undo the precision of sums."""
    return torch.autocast(q.device.type, enabled=False)
