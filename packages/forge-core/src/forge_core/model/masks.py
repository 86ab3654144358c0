"""What attention is told about who may see whom, prepared once a forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge_core.contract import LayerContext
from forge_core.errors import ForgeError
from forge_core.model.documents import run_lengths

Predicate = Callable[[LayerContext, Tensor, Tensor], Tensor]
"""`f(context, q, k) -> bool`: q (S, 1) and k (1, K) are int64 indices of the sequence, cached tokens
included; the answer broadcasts to (S, K) or (B, S, K)."""

SHORT_DOCUMENTS = 32
"""Mean length in tokens under which, on a CPU, a call a document costs more than a block mask saves."""


class DocumentRuns(NamedTuple):
    """One attention call a document. `lengths` sum to B * S, see `run_lengths`."""

    lengths: tuple[int, ...]


class VarlenRuns(NamedTuple):
    """Documents for a varlen kernel: `bounds` (N + 1,) int32 cumulative lengths, `longest` at most S."""

    bounds: Tensor
    longest: int


class AttentionMasks:
    """Turns documents, padding and predicates into what `attend` takes.

    A key is seen if (causal or any "or" predicate) and same document and valid and every "and" predicate. A
    query that would see nothing (padding) sees itself, so that its softmax stays finite.

    Args:
        strategy: `model.attention`. With padding or predicates only a mask ("flex" on CUDA) can express the
            rule, and "documents" and "varlen" become that.
        predicates: pairs ("and" | "or", `Predicate`).

    Raises:
        ForgeError: a pair does not say "and" or "or".
    """

    def __init__(self, strategy: str, predicates: Sequence[tuple[str, Predicate]] = ()) -> None:
        for how, predicate in predicates:
            if how not in ("and", "or"):
                raise ForgeError(f'mask predicate {predicate} combines by {how!r}, not "and" or "or"')
        self.strategy = strategy
        self.admit = tuple(f for how, f in predicates if how == "or")
        self.hide = tuple(f for how, f in predicates if how == "and")

    def prepare(self, context: LayerContext, x: Tensor, ragged: bool = True) -> Any:
        """The mask of one forward.

        Args:
            context: documents, valid and cache are read.
            x: (B, S, D) input of the first block.
            ragged: shapes may change from forward to forward (not where blocks are compiled).

        Returns:
            None for plain causal attention, a bool tensor (B or 1, 1, S, K), `DocumentRuns`, `VarlenRuns`, or
            flex attention's block mask.

        Raises:
            ForgeError: documents with a cache, or a strategy that this device lacks.
        """
        if context.cache is not None:
            return self._cached(context, x)
        if context.valid is not None or self.admit or self.hide:
            dense = self.dense(context, x, 0, context.valid)
            if self._on_device(x) != "flex":
                return dense
            rows = dense.expand(x.shape[0], -1, -1, -1)
            return flex_mask(lambda b, h, q, k: rows[b, 0, q, k], x)
        return None if context.documents is None else self._packed(context, x, context.documents, ragged)

    def _packed(self, context: LayerContext, x: Tensor, documents: Tensor, ragged: bool) -> Any:
        strategy = self._on_device(x)
        on_host = x.device.type == "cpu"
        lengths = run_lengths(documents) if on_host or strategy in ("documents", "varlen") else []
        if on_host and len(lengths) == len(documents):
            return None
        if strategy == "auto":
            long = bool(lengths) and sum(lengths) >= SHORT_DOCUMENTS * len(lengths)
            strategy = "documents" if ragged and long else "mask"
        if strategy == "documents":
            return DocumentRuns(tuple(lengths))
        if strategy == "varlen":
            bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            return VarlenRuns(bounds.to(x.device), x.shape[1])
        if strategy == "flex":
            return flex_mask(lambda b, h, q, k: (q >= k) & (documents[b, q] == documents[b, k]), x)
        return self.dense(context, x, 0, None)

    def _on_device(self, x: Tensor) -> str:
        if x.device.type == "cuda":
            return "flex" if self.strategy == "auto" else self.strategy
        if self.strategy in ("flex", "varlen"):
            raise ForgeError(
                f'model.attention = "{self.strategy}" needs a CUDA device, this one is {x.device.type}',
                'use "auto", "mask" or "documents"',
            )
        return self.strategy

    def _cached(self, context: LayerContext, x: Tensor) -> Tensor | None:
        cache: Any = context.cache
        if context.documents is not None:
            raise ForgeError("packed documents cannot be decoded with a cache")
        if (
            cache.valid is None
            and not self.admit
            and not self.hide
            and (x.shape[1] == 1 or cache.length == 0)
        ):
            return None
        return self.dense(context, x, cache.length, cache.valid)

    def dense(self, context: LayerContext, x: Tensor, offset: int, valid: Tensor | None) -> Tensor:
        """The rule as a bool tensor (B or 1, 1, S, offset + S), True where the key is seen.

        Args:
            offset: tokens before x (B, S, D).
            valid: (B, at least offset + S) bool, or None.
        """
        end = offset + x.shape[1]
        k = torch.arange(end, device=x.device)[None]
        q = k[:, offset:].T
        seen = k <= q
        for predicate in self.admit:
            seen = seen | predicate(context, q, k)
        if context.documents is not None:
            seen = seen & (context.documents[:, :, None] == context.documents[:, None, :])
        if valid is not None:
            seen = seen & valid[:, None, :end]
        for predicate in self.hide:
            seen = seen & predicate(context, q, k)
        if valid is not None or self.hide:
            seen = seen | (~seen.any(-1, keepdim=True) & (k == q))
        return seen[None, None] if seen.ndim == 2 else seen[:, None]


def flex_mask(rule: Callable[..., Tensor], x: Tensor) -> Any:
    """Flex attention's block mask of `rule(b, h, q, k) -> bool` for x (B, S, D)."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, length = x.shape[:2]
    return create_block_mask(rule, rows, None, length, length, device=x.device)
