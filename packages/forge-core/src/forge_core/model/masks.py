"""What attention is told about who may see whom, prepared once a forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from forge_core.contract import LayerContext
from forge_core.errors import ForgeError
from forge_core.model.documents import run_bounds, run_lengths

if TYPE_CHECKING:
    from forge_core.parallel.sequence import SequencePart

Predicate = Callable[[LayerContext, Tensor, Tensor], Tensor]
"""`f(context, q, k) -> bool`: q (S, 1) and k (1, K) are int64 indices of the sequence, cached tokens
included; the answer broadcasts to (S, K) or (B, S, K)."""

SHORT_DOCUMENTS = 32
"""Mean length in tokens under which, on a CPU, a call a document costs more than a block mask saves."""


class DocumentRuns(NamedTuple):
    """One attention call a document. `lengths` sum to B * S, see `run_lengths`; `window` as in `prepare`."""

    lengths: tuple[int, ...]
    window: int | None = None


class VarlenRuns(NamedTuple):
    """Documents for a varlen kernel: `bounds` (N + 1,) int32 cumulative lengths, `longest` at most S."""

    bounds: Tensor
    longest: int
    window: int | None = None


class SlicedMask(NamedTuple):
    """For the queries of one context rank and the keys of all, which `part` gathers.

    `mask` is a bool tensor (B or 1, 1, S / cp, S) or flex attention's block mask; `runs` are (first query,
    one past the last, keys that any of them sees) of pieces to run one after another.
    """

    part: SequencePart
    mask: Any
    runs: tuple[tuple[int, int, int], ...]


class RingMask(NamedTuple):
    """For the queries of one context rank and the keys of all, which `part` sends round a ring.

    Attributes as in `forge_core.parallel.turns.Rule`.
    """

    part: SequencePart
    documents: Tensor | None
    bounds: Tensor | None
    seen: Tensor | None
    window: int | None


class AttentionMasks:
    """Turns documents, padding and predicates into what `attend` takes.

    A key is seen if (causal and in the window, or any "or" predicate) and same document and valid and every
    "and" predicate. A query that would see nothing (padding) sees itself, so that its softmax stays finite.
    The window of the layer is `context.window`: query q sees key k if q - k is under it. Predicates that it
    should bind, too, read it there.

    Args:
        strategy: `model.attention`. With padding or predicates only a mask ("flex" on CUDA) can express the
            rule, and "documents" and "varlen" become that.
        predicates: pairs ("and" | "or", `Predicate`).
        capped: scores are capped, which only flex attention does without forming all of them: where it is
            there, plain causal attention takes it, too.

    Raises:
        ForgeError: a pair does not say "and" or "or".
    """

    def __init__(
        self, strategy: str, predicates: Sequence[tuple[str, Predicate]] = (), capped: bool = False
    ) -> None:
        for how, predicate in predicates:
            if how not in ("and", "or"):
                raise ForgeError(f'mask predicate {predicate} combines by {how!r}, not "and" or "or"')
        self.strategy, self.capped = strategy, capped
        self.admit = tuple(f for how, f in predicates if how == "or")
        self.hide = tuple(f for how, f in predicates if how == "and")

    def prepare(self, context: LayerContext, x: Tensor, ragged: bool = True) -> Any:
        """The mask of one forward.

        Args:
            context: documents, valid, window and cache are read.
            x: (B, S, D) input of the first block.
            ragged: shapes may change from forward to forward (not where blocks are compiled).

        Returns:
            None for plain causal attention, a bool tensor (B or 1, 1, S, K), `DocumentRuns`, `VarlenRuns`,
            flex attention's block mask; `SlicedMask` or `RingMask` where context ranks divide the sequence.

        Raises:
            ForgeError: documents with a cache, or a strategy that this device lacks.
        """
        if context.cache is not None:
            return self._cached(context, x)
        if context.part is not None and context.part.by_context:
            if self._rings(context, x, context.part):
                return self._round(context, x, context.part)
            return self._sliced(context, x, context.part)
        window = _binding(context.window, x.shape[1])
        if self._masked(context):
            dense = self.dense(context, x, 0, context.valid)
            if self._on_device(x) != "flex":
                return dense
            rows = dense.expand(x.shape[0], -1, -1, -1)
            return flex_mask(lambda b, h, q, k: rows[b, 0, q, k], x)
        if context.documents is not None:
            return self._packed(context, x, context.documents, ragged)
        if window is not None or (self.capped and x.device.type == "cuda" and self._on_device(x) == "flex"):
            return self._windowed(context, x, window)
        return None

    def _sliced(self, context: LayerContext, x: Tensor, part: SequencePart) -> SlicedMask:
        """The rows of the whole rule that this rank's x (B, S / cp, D) stands for."""
        length = x.shape[1] * part.ranks
        queries = part.index(length, x.device)
        on_cuda = x.device.type == "cuda"
        # kernels for whole documents cannot be told which part of the queries is here
        if self._on_device(x) == "mask" or not on_cuda:
            mask: Any = self.dense(context, x, 0, context.valid, queries)
        elif self._masked(context):
            rows = self.dense(context, x, 0, context.valid, queries).expand(x.shape[0], -1, -1, -1)
            mask = flex_mask(lambda b, h, q, k: rows[b, 0, q, k], x, length)
        else:
            rule = _in_document(context.documents, _binding(context.window, length))
            mask = flex_mask(lambda b, h, q, k: rule(b, h, queries[q], k), x, length)
        runs, first = [], 0
        for start, end in part.pieces(length):
            runs.append((first, first + end - start, length if self.admit else end))
            first += end - start
        return SlicedMask(part, mask, tuple(runs))

    def _rings(self, context: LayerContext, x: Tensor, part: SequencePart) -> bool:
        """Whether keys and values go round: where asked for, or where the flash kernel can do all blocks."""
        if part.attention != "auto":
            return part.attention == "ring"
        bound = _binding(context.window, x.shape[1] * part.ranks) is not None
        return not (bound or self.capped or self._masked(context))

    def _masked(self, context: LayerContext) -> bool:
        """Whether only a mask can express the rule."""
        return context.valid is not None or bool(self.admit) or bool(self.hide)

    def _round(self, context: LayerContext, x: Tensor, part: SequencePart) -> RingMask:
        """The rule for this rank's x (B, S / cp, D), block by block."""
        length = x.shape[1] * part.ranks
        queries = part.index(length, x.device)
        if self._masked(context):
            seen = self.dense(context, x, 0, context.valid, queries)[:, 0]
            return RingMask(part, None, None, seen, None)
        documents, bounds = context.documents, None
        if documents is not None and x.device.type != "cpu":
            # never more than in the whole: one that is cut in two goes on without a gap
            bounds = run_bounds(documents[:, queries], context.document_count)
        return RingMask(part, documents, bounds, None, _binding(context.window, length))

    def _windowed(self, context: LayerContext, x: Tensor, window: int | None) -> Any:
        """One document a row, which the kernel for plain causal attention cannot do."""
        strategy = self._on_device(x)
        if strategy == "flex":
            return flex_mask(_in_document(None, window), x)
        if strategy == "varlen":
            rows, length = x.shape[:2]
            ends = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=x.device)
            return VarlenRuns(ends, length, window)
        return self.dense(context, x, 0, None)

    def _packed(self, context: LayerContext, x: Tensor, documents: Tensor, ragged: bool) -> Any:
        strategy = self._on_device(x)
        on_host = x.device.type == "cpu"
        lengths = run_lengths(documents) if on_host or strategy == "documents" else []
        window = _binding(context.window, max(lengths, default=x.shape[1]))
        if on_host and len(lengths) == len(documents):
            return None if window is None else self._windowed(context, x, window)
        if strategy == "auto":
            long = bool(lengths) and sum(lengths) >= SHORT_DOCUMENTS * len(lengths)
            strategy = "documents" if ragged and long else "mask"
        if strategy == "documents":
            return DocumentRuns(tuple(lengths), window)
        if strategy == "varlen":
            return VarlenRuns(run_bounds(documents, context.document_count), x.shape[1], window)
        if strategy == "flex":
            return flex_mask(_in_document(documents, window), x)
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
            and _binding(context.window, cache.length + x.shape[1]) is None
        ):
            return None
        return self.dense(context, x, cache.length, cache.valid)

    def dense(
        self,
        context: LayerContext,
        x: Tensor,
        offset: int,
        valid: Tensor | None,
        queries: Tensor | None = None,
    ) -> Tensor:
        """The rule as a bool tensor (B or 1, 1, S, offset + S), True where the key is seen.

        Args:
            offset: tokens before x (B, S, D).
            valid: (B, at least offset + S) bool, or None.
            queries: (S / cp,) places of the tokens of x in the sequence, where a rank has a part of it.
        """
        parts = 1 if queries is None or context.part is None else context.part.ranks
        end = offset + x.shape[1] * parts
        k = torch.arange(end, device=x.device)[None]
        q = k[:, offset:].T if queries is None else queries[:, None]
        seen = k <= q
        if (window := _binding(context.window, end)) is not None:
            seen = seen & (q - k < window)
        for predicate in self.admit:
            seen = seen | predicate(context, q, k)
        if context.documents is not None:
            documents = context.documents
            mine = documents if queries is None else documents[:, queries]
            seen = seen & (mine[:, :, None] == documents[:, None, :])
        if valid is not None:
            seen = seen & valid[:, None, :end]
        for predicate in self.hide:
            seen = seen & predicate(context, q, k)
        if valid is not None or self.hide:
            seen = seen | (~seen.any(-1, keepdim=True) & (k == q))
        return seen[None, None] if seen.ndim == 2 else seen[:, None]


def _binding(window: int | None, length: int) -> int | None:
    """The window, None where it hides nothing in a sequence of `length`."""
    return None if window is None or window >= length else window


def _in_document(documents: Tensor | None, window: int | None) -> Callable[..., Tensor]:
    """Flex attention's rule of packed documents (B, S), or of one a row, within the window."""
    if documents is None:
        return lambda b, h, q, k: (q >= k) & (True if window is None else q - k < window)
    if window is None:
        return lambda b, h, q, k: (q >= k) & (documents[b, q] == documents[b, k])
    return lambda b, h, q, k: (q >= k) & (q - k < window) & (documents[b, q] == documents[b, k])


def flex_mask(rule: Callable[..., Tensor], x: Tensor, keys: int | None = None) -> Any:
    """Flex attention's block mask of `rule(b, h, q, k) -> bool` for x (B, S, D) and as many keys, or
    `keys`."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, length = x.shape[:2]
    return create_block_mask(rule, rows, None, length, keys or length, device=x.device)
