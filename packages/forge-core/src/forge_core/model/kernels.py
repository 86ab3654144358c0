"""Attention over prepared masks: one function, several kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core.model.masks import DocumentRuns, VarlenRuns


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v over the keys that `mask` admits.

    Args:
        q: (B, heads, S, head_dim). k, v: (B, kv_heads, K, head_dim), kv_heads dividing heads.
        mask: what `AttentionMasks.prepare` returned; None: causal, or all keys for a single query.

    Returns:
        (B, heads, S, head_dim).
    """
    grouped = q.shape[1] != k.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=grouped)
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    if isinstance(mask, DocumentRuns):
        return _by_document(q, k, v, mask, grouped)
    if isinstance(mask, VarlenRuns):
        return _varlen(q, k, v, mask, grouped)
    return _flex(q, k, v, mask, grouped)


def _rows(x: Tensor) -> Tensor:
    """(B, heads, S, head_dim) -> (B * S, heads, head_dim); no copy for what comes from a projection."""
    return x.transpose(1, 2).flatten(0, 1)


def _by_document(q: Tensor, k: Tensor, v: Tensor, runs: DocumentRuns, grouped: bool) -> Tensor:
    lengths = list(runs.lengths)
    # split, not slices: the backward of a slice fills a whole tensor with zeros for every document
    parts = [torch.split(_rows(x).transpose(0, 1)[None], lengths, 2) for x in (q, k, v)]
    done = [
        F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=grouped).transpose(1, 2)
        for a, b, c in zip(*parts, strict=True)
    ]
    return torch.cat(done, 1).view(q.shape[0], q.shape[2], *done[0].shape[2:]).transpose(1, 2)


def _varlen(q: Tensor, k: Tensor, v: Tensor, runs: VarlenRuns, grouped: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = runs
    packed = (_rows(q), _rows(k), _rows(v))
    y = varlen_attn(*packed, bounds, bounds, longest, longest, window_size=(-1, 0), enable_gqa=grouped)
    assert isinstance(y, Tensor)
    return y.view(q.shape[0], q.shape[2], *y.shape[1:]).transpose(1, 2)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Any, grouped: bool) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Any = flex_attention
    if q.device.type == "cuda" and not torch.compiler.is_compiling():
        kernel = _compiled_flex()
    return kernel(q, k, v, block_mask=mask, enable_gqa=grouped)  # type: ignore[no-any-return]


@functools.cache
def _compiled_flex() -> Any:
    """Flex attention for an eager model: uncompiled it would form all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
