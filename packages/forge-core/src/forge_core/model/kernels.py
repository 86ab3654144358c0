"""Attention over prepared masks: one function, several kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core.errors import ForgeError
from forge_core.model.masks import DocumentRuns, RingMask, SlicedMask, VarlenRuns


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v over the keys that `mask` admits.

    Args:
        q: (B, heads, S, head_dim). k, v: (B, kv_heads, K, head_dim), kv_heads dividing heads.
        mask: what `AttentionMasks.prepare` returned; None: causal, or all keys for a single query.
        scale: of the scores; None: 1 / sqrt(head_dim).
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma Team 2024, "Gemma 2", section 2).
            Flex attention does that itself; elsewhere all scores are formed.

    Returns:
        (B, heads, S, head_dim).

    Raises:
        ForgeError: scores to be capped and a varlen mask.
    """
    if isinstance(mask, DocumentRuns):
        return _by_document(q, k, v, mask, scale, softcap)
    if isinstance(mask, VarlenRuns):
        return _varlen(q, k, v, mask, scale, softcap)
    if isinstance(mask, SlicedMask):
        return _sliced(q, k, v, mask, scale, softcap)
    if isinstance(mask, RingMask):
        return _round(q, k, v, mask, scale, softcap)
    if mask is None or isinstance(mask, Tensor):
        return _dense(q, k, v, mask, scale, softcap)
    return _flex(q, k, v, mask, scale, softcap)


def _grouped(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] != k.shape[1]


def _dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, softcap: float | None
) -> Tensor:
    """Torch's kernel, or all scores at once where they are capped."""
    causal = mask is None and q.shape[2] > 1
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=_grouped(q, k)
        )
    if _grouped(q, k):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    exact = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=exact).to(v.dtype) @ v


def _sliced(
    q: Tensor, k: Tensor, v: Tensor, sliced: SlicedMask, scale: float | None, softcap: float | None
) -> Tensor:
    """Queries of this context rank, keys and values of all."""
    part = sliced.part
    if k.shape == v.shape:
        k, v = part.gather(torch.stack((k, v)), 3).unbind()
    else:
        k, v = part.gather(k, 2), part.gather(v, 2)
    if not isinstance(sliced.mask, Tensor):
        return _flex(q, k, v, sliced.mask, scale, softcap)
    done = [
        _dense(
            q[:, :, first:last],
            k[:, :, :end],
            v[:, :, :end],
            sliced.mask[..., first:last, :end],
            scale,
            softcap,
        )
        for first, last, end in sliced.runs
    ]
    return torch.cat(done, 2)


def _round(
    q: Tensor, k: Tensor, v: Tensor, mask: RingMask, scale: float | None, softcap: float | None
) -> Tensor:
    """Queries of this context rank; keys and values go round."""
    from forge_core.parallel.ring import ring_attention
    from forge_core.parallel.turns import Rule

    return ring_attention(q, k, v, Rule(*mask[1:]), mask.part.ring, scale, softcap)


def _rows(x: Tensor) -> Tensor:
    """(B, heads, S, head_dim) -> (B * S, heads, head_dim); no copy for what comes from a projection."""
    return x.transpose(1, 2).flatten(0, 1)


def _by_document(
    q: Tensor, k: Tensor, v: Tensor, runs: DocumentRuns, scale: float | None, softcap: float | None
) -> Tensor:
    lengths = list(runs.lengths)
    # split, not slices: the backward of a slice fills a whole tensor with zeros for every document
    parts = [torch.split(_rows(x).transpose(0, 1)[None], lengths, 2) for x in (q, k, v)]
    bands = {n: _band(n, runs.window, q.device) for n in set(lengths)}
    done = [
        _dense(a, b, c, bands[a.shape[2]], scale, softcap).transpose(1, 2)
        for a, b, c in zip(*parts, strict=True)
    ]
    return torch.cat(done, 1).view(q.shape[0], q.shape[2], *done[0].shape[2:]).transpose(1, 2)


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """(length, length) bool, True for the last `window` keys of each query; None where that hides nothing."""
    if window is None or length <= window:
        return None
    index = torch.arange(length, device=device)
    back = index[:, None] - index
    return (back >= 0) & (back < window)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, runs: VarlenRuns, scale: float | None, softcap: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if softcap is not None:
        raise ForgeError("the varlen kernel cannot cap scores", 'set model.attention = "auto"')
    bounds, longest, window = runs
    packed = (_rows(q), _rows(k), _rows(v))
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    options["window_size"] = (-1 if window is None else window - 1, 0)
    y = varlen_attn(*packed, bounds, bounds, longest, longest, enable_gqa=_grouped(q, k), **options)
    assert isinstance(y, Tensor)
    return y.view(q.shape[0], q.shape[2], *y.shape[1:]).transpose(1, 2)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, softcap: float | None) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Any = flex_attention
    if q.device.type == "cuda" and not torch.compiler.is_compiling():
        kernel = _compiled_flex()
    options: dict[str, Any] = {} if softcap is None else {"score_mod": _capping(softcap)}
    return kernel(q, k, v, block_mask=mask, scale=scale, enable_gqa=_grouped(q, k), **options)  # type: ignore[no-any-return]


@functools.cache
def _capping(cap: float) -> Any:
    """Flex attention's rule for capped scores; one function a cap, so that nothing compiles again."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@functools.cache
def _compiled_flex() -> Any:
    """Flex attention for an eager model: uncompiled it would form all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
