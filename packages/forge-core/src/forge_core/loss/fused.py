"""Cross-entropy fused with the head: logits exist for one chunk of tokens at a time, in the forward only.

The gradient of a cross-entropy with respect to its logits needs nothing from what comes after it but a
factor. So the forward computes a chunk's logits, turns them in place into their gradient, multiplies that
into the gradients of hidden states and head, and reuses the memory for the next chunk; the backward applies
the factor.

With x the logits of a token, t its target and lse = log sum exp x, a token's loss is
`lse - x[t] + z * lse^2` (z-loss: Chowdhery et al. 2022, "PaLM", section 5) and its gradient
`(1 + 2 z lse) softmax(x) - onehot(t)`.

A head split over the vocabulary has one seam: the softmax. Its maximum, its sum and the picked logit are the
only values that see a whole row. `VocabularySlice` reduces them over the ranks that share the vocabulary, and
the gradient of the hidden states; the rest holds for a slice of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from forge_core.loss.shift import IGNORE
from forge_core.loss.vocabulary import VocabularySlice, vocabulary_slice

_CHUNK_ELEMENTS = 1 << 24
"""Logits of a chunk on a CPU: few enough for 1/8 of the memory, enough for products at full speed."""
_CHUNK_ELEMENTS_ACCELERATOR = 1 << 27
_WORTH_SELECTING = 0.9
"""Share of supervised rows up to which gathering them costs less than computing the others."""


@attrs.frozen
class _Settings:
    """Weight of the z-loss, tokens of a chunk (0 chooses), factor of the loss, cap of the logits, rows of the
    head that are here (None: all)."""

    z: float
    chunk_size: int
    scale: float | Tensor
    cap: float | None = None
    part: VocabularySlice | None = None


@attrs.frozen
class _Gradients:
    """Gradients (N, D), (V, D), (V,), or None where they are not wanted."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


def fused_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    z_loss_weight: float = 0.0,
    chunk_size: int = 0,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of a linear head, without its logits ever being there as a whole.

    Softmax, loss and sums are computed in fp32 (fp64 for fp64 input), whatever the input and also under
    autocast; on a CPU low precision is raised to fp32 for the products too. The gradients of hidden states
    and head (V * D numbers) are kept from the forward until the backward hands them over; a second backward
    needs `retain_graph=True` in the first, which then copies them.

    Args:
        hidden: (..., D) final hidden states.
        weight: (V, D) of the head; may be the embedding's own parameter. A DTensor divided by rows over
            tensor ranks takes part as it is: hidden states and targets are the same on all of them, and so is
            what comes back.
        targets: (...) int64, already shifted; -100 supervises nothing.
        bias: (V,) of the head.
        z_loss_weight: weight of the squared log-normaliser, summed over supervised tokens.
        chunk_size: most tokens whose logits exist at a time; 0 chooses by vocabulary and device.
        scale: factor of the loss that is known now (1 / count of tokens), a number or a () tensor. On a CPU
            the backward then has nothing to do where the gradient that comes in is 1.

    Returns:
        loss: () fp32 with a graph, `scale * (cross-entropy + z-loss)` summed over supervised tokens; zero,
            with zero gradients, where nothing is supervised.
        token_loss: (...) fp32 without graph or scale, the cross-entropy of each position; 0 at -100.
    """
    if torch.compiler.is_compiling():
        pair: tuple[Tensor, Tensor] = _outside_of_graph(
            hidden, weight, bias, targets, z_loss_weight, chunk_size, scale, softcap
        )
        return pair
    return _fused(hidden, weight, bias, targets, z_loss_weight, chunk_size, scale, softcap)


def _fused(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    z_loss_weight: float,
    chunk_size: int,
    scale: float | Tensor | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    weight, part = vocabulary_slice(weight)
    settings = _Settings(z_loss_weight, chunk_size, 1.0 if scale is None else scale, softcap, part)
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if torch.is_grad_enabled():
        loss, token_loss = _FusedCrossEntropy.apply(rows, weight, bias, labels, settings)  # type: ignore[no-untyped-call]
    else:
        loss, token_loss, _ = _run(rows, weight, bias, labels, settings, (False, False, False))
    return loss, token_loss.view(targets.shape)


# There is nothing to trace in chunks that write to one memory and rows that the host picks. Unlike
# `torch.compiler.disable`, this decorator imports the compiler at the first call and not with the module.
_outside_of_graph: Any = _disable_dynamo(_fused)


class _FusedCrossEntropy(torch.autograd.Function):
    """Computes gradients in `forward`; `backward` multiplies them by what comes in."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[:3]
        loss, token_loss, gradients = _run(hidden, weight, bias, targets, settings, wanted)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(token_loss)
        ctx.set_materialize_grads(False)
        return loss, token_loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if factor is None:
            return (None,) * 5
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        is_one = factor.device.type == "cpu" and bool(factor.numpy() == 1)
        scaled: list[Tensor | None] = []
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            if gradient is not None:
                if kept:
                    gradient = gradient * factor
                elif not is_one:
                    gradient.mul_(factor)
                gradient = gradient.to(dtype)
            scaled.append(gradient)
        return (*scaled, None, None)


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    settings: _Settings,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, _Gradients]:
    """Loss (), token losses (N,) and the gradients of (N, D) `hidden`, (V, D) `weight`, (V,) `bias`."""
    rows = _rows_to_select(targets)
    some, labels = (hidden, targets) if rows is None else (hidden[rows], targets[rows])
    work = _Work(some, weight, bias, settings, wanted)
    vocabulary = len(weight) if settings.part is None else settings.part.most
    for part in _parts(len(labels), vocabulary, settings.chunk_size, hidden.device.type):
        work.add(part, labels[part])
    if settings.part is not None and work.gradients.hidden is not None:
        settings.part.sum_(work.gradients.hidden)
    loss, token_loss, gradients = work.loss(), work.token_loss, work.gradients
    if rows is not None:
        token_loss = _spread(token_loss, rows, len(targets))
        if gradients.hidden is not None:
            gradients = attrs.evolve(gradients, hidden=_spread(gradients.hidden, rows, len(targets)))
    return loss, token_loss, gradients


class _Work:
    """Inputs, results and the one buffer of logits, chunk after chunk.

    Every product writes to memory that is there (`out=`); autocast leaves such products alone.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: _Settings,
        wanted: tuple[bool, bool, bool],
    ) -> None:
        dtype = _product_dtype(hidden, weight)
        self.exact = torch.promote_types(dtype, torch.float32)
        self.widen: dict[str, Any] = {} if dtype is self.exact else {"out_dtype": self.exact}
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self.bias = None if bias is None else bias.to(self.exact)
        self.settings, self.forward_only = settings, not any(wanted)
        self.token_loss = hidden.new_zeros(len(hidden), dtype=self.exact)
        self.squares = hidden.new_zeros((), dtype=self.exact)
        new = torch.empty_like if len(hidden) else torch.zeros_like
        self.gradients = _Gradients(
            new(self.hidden, dtype=self.exact) if wanted[0] else None,
            new(self.weight, dtype=self.exact) if wanted[1] else None,
            torch.zeros_like(self.bias) if wanted[2] and self.bias is not None else None,
        )
        self._logits = hidden.new_empty(0, dtype=self.exact)

    def loss(self) -> Tensor:
        """() the scaled loss of all chunks."""
        total = self.token_loss.sum()
        if self.settings.z:
            total = total + self.settings.z * self.squares
        return (total * self.settings.scale).to(self.exact)

    def add(self, part: slice, targets: Tensor) -> None:
        """Losses and gradients of the tokens in `part`, whose targets are (n,)."""
        hidden, z = self.hidden[part], self.settings.z
        if not len(self._logits):
            self._logits = self._logits.new_empty(len(hidden), len(self.weight))
        logits = torch.mm(hidden, self.weight.t(), out=self._logits[: len(hidden)], **self.widen)
        if self.bias is not None:
            logits.add_(self.bias)
        slope = None if self.settings.cap is None else _cap_(logits, self.settings.cap)
        supervised = (targets != IGNORE).unsqueeze(1)
        index = targets.clamp(min=0).unsqueeze(1)
        part_of, inside = self.settings.part, None
        if part_of is None:
            picked, lse, total = _softmax_(logits, index)
        else:
            index, inside = part_of.locate(index, len(self.weight))
            picked, lse, total = part_of.softmax_(logits, index, inside)
        self.token_loss[part] = torch.where(supervised, lse - picked, 0.0).squeeze(1)
        if z:
            self.squares += torch.where(supervised, lse * lse, 0.0).sum()
        if self.forward_only:
            return
        of_target = supervised.to(self.exact) * self.settings.scale
        of_softmax = of_target * (1 + 2 * z * lse) if z else of_target
        here = of_target if inside is None else of_target * inside
        logits.mul_(of_softmax / total).scatter_add_(1, index, -here)
        if slope is not None:
            logits.mul_(slope)
        self._add_gradients(part, hidden, logits)

    def _add_gradients(self, part: slice, hidden: Tensor, of_logits: Tensor) -> None:
        """Multiply the gradient of the logits (n, V) into those of hidden states, weight and bias."""
        total = self.gradients
        if total.bias is not None:
            total.bias.add_(of_logits.sum(0))
        of_logits = of_logits.to(hidden.dtype)
        if total.hidden is not None:
            torch.mm(of_logits, self.weight, out=total.hidden[part], **self.widen)
        if total.weight is not None and part.start == 0:
            torch.mm(of_logits.t(), hidden, out=total.weight, **self.widen)
        elif total.weight is not None:
            torch.addmm(total.weight, of_logits.t(), hidden, out=total.weight, **self.widen)


def _cap_(logits: Tensor, cap: float) -> Tensor:
    """Turn `logits` (n, V) in place into cap * tanh(logits / cap); returns the derivative of that (n, V)."""
    bent = logits.div_(cap).tanh_()
    slope = 1 - bent.square()
    bent.mul_(cap)
    return slope


def _softmax_(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn `logits` (n, V) in place into exp(x - max x).

    Returns the logits at `index`, log sum exp of each row, and the sum of what is now in it, each (n, 1).
    """
    picked = logits.gather(1, index)
    largest = logits.amax(1, keepdim=True)
    total = logits.sub_(largest).exp_().sum(1, keepdim=True)
    return picked, largest + total.log(), total


def _parts(tokens: int, vocabulary: int, chunk_size: int, device: str) -> Iterator[slice]:
    """Slices of about one size, of at most `chunk_size` tokens; 0: what the share of logits allows."""
    elements = _CHUNK_ELEMENTS if device == "cpu" else _CHUNK_ELEMENTS_ACCELERATOR
    most = chunk_size or max(elements // vocabulary, 1)
    size = max(-(-tokens // max(-(-tokens // most), 1)), 1)
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _rows_to_select(targets: Tensor) -> Tensor | None:
    """Numbers of the supervised rows, where leaving out the others saves work; None to take every row.

    Only on a CPU: elsewhere the host would wait for the device.
    """
    if targets.device.type != "cpu":
        return None
    supervised = targets.numpy() != IGNORE
    if np.count_nonzero(supervised) > _WORTH_SELECTING * len(supervised):
        return None
    return torch.from_numpy(np.flatnonzero(supervised))


def _spread(values: Tensor, rows: Tensor, length: int) -> Tensor:
    """`values` (n, ...) at `rows` of a tensor (length, ...) that is zero elsewhere."""
    return values.new_zeros(length, *values.shape[1:]).index_copy_(0, rows, values)


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """dtype of the products: bf16 where CUDA computes in it and sums in fp32; else fp32 or more."""
    if hidden.device.type == "cuda":
        autocast = torch.is_autocast_enabled("cuda")
        compute = torch.get_autocast_dtype("cuda") if autocast else hidden.dtype
        if compute is torch.bfloat16:
            return compute
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
