"""The blocks of ring attention, beside attention over the whole sequence on one device.

The turns of 4 context ranks are taken one after another on one device, with nothing sent: what they compute
has to be the same, and to take little longer. On a GPU, in bf16, they run in the flash kernel; on a CPU, in
fp32 and shorter, in plain products. Ends within two minutes.

usage: python benchmarks/ring.py [--json] [--check] [--pairs N]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from _common import Goal, Report, arguments, paired
from torch import Tensor

from forge_core.model.documents import run_bounds
from forge_core.parallel.pieces import places_of
from forge_core.parallel.turns import Rule, Turns

RANKS, HEADS, KV_HEADS, WIDTH = 4, 16, 8, 128
DIFFERENCE = {"cuda": 2**-6, "cpu": 1e-5}
"""Of the largest number, in bf16 and in fp32."""


class Circle:
    """A rank of a ring in which nothing is sent."""

    size = RANKS

    def __init__(self, rank: int) -> None:
        self.rank = rank


class Case:
    """Inputs, and attention over them in both ways.

    Args:
        length: tokens of the only row. documents: about eight, or one.
    """

    def __init__(self, device: torch.device, length: int, documents: bool) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        shapes = [(HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, WIDTH), (HEADS, WIDTH)]
        made = [torch.randn(1, length, h, w, device=device, dtype=dtype) for h, w in shapes]
        self.q, self.k, self.v, self.grad = made
        chances = torch.full((1, length), 8 / length)
        self.documents = torch.bernoulli(chances).cumsum(1).int().to(device) if documents else None
        self.mask = None
        if self.documents is not None:
            places = torch.arange(length, device=device)
            same = self.documents[:, :, None] == self.documents[:, None]
            self.mask = (same & (places[:, None] >= places))[:, None]

    def whole(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Output and gradients of q, k and v by torch's own attention."""
        inputs = [
            x.to(dtype or x.dtype).transpose(1, 2).detach().requires_grad_() for x in (self.q, self.k, self.v)
        ]
        out = F.scaled_dot_product_attention(
            *inputs, attn_mask=self.mask, is_causal=self.mask is None, enable_gqa=True
        )
        out.backward(self.grad.to(out.dtype).transpose(1, 2))
        return [x.detach().transpose(1, 2) for x in (out, *(i.grad for i in inputs if i.grad is not None))]

    def ring(self) -> list[Tensor]:
        """The same by the turns of all ranks."""
        exact = {"dtype": torch.float32}
        out = torch.zeros_like(self.q, **exact)
        found = [torch.zeros_like(x, **exact) for x in (self.q, self.k, self.v)]
        length, device = self.q.shape[1], self.q.device
        places = [places_of(length, RANKS, rank, device) for rank in range(RANKS)]
        for rank, mine in enumerate(places):
            bounds = None
            if self.documents is not None:
                bounds = run_bounds(self.documents[:, mine])
            circle: Any = Circle(rank)
            turns = Turns(circle, Rule(self.documents, bounds), length // RANKS, device, WIDTH**-0.5, None)
            q, grad = self.q[:, mine], self.grad[:, mine]
            part = torch.zeros_like(q, **exact)
            lse = part.new_full(part.shape[:3], float("-inf"))
            for source in range(RANKS):
                turns.forward(source, q, self.k[:, places[source]], self.v[:, places[source]], part, lse)
            out[:, mine] = part
            dq = torch.zeros_like(part)
            for source in range(RANKS):
                k, v = self.k[:, places[source]], self.v[:, places[source]]
                dk, dv = torch.zeros_like(k, **exact), torch.zeros_like(v, **exact)
                turns.backward(source, (grad, q, k, v, part.to(q.dtype), lse), dq, dk, dv)
                found[1].index_add_(1, places[source], dk)
                found[2].index_add_(1, places[source], dv)
            found[0][:, mine] = dq
        return [out, *found]


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length = 16384 if device.type == "cuda" else 512
    report = Report("ring", ["case", "value", "95 %", "goal"])
    for documents in (False, True):
        case = Case(device, length, documents)
        exact = torch.float32 if device.type == "cuda" else torch.float64
        pairs = zip(case.ring(), case.whole(exact), strict=True)
        worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        name = f"{'documents' if documents else 'one document'}, {length} tokens"
        report.value(f"difference, {name}", Goal("of the largest number", DIFFERENCE[device.type]), worst)
        if not documents:  # torch's attention has no kernel for documents to compare with
            took = paired(partial(timed, case.whole), partial(timed, case.ring), options.pairs or 20)
            report.ratio(f"time, {name}", None, took.ratio())
    report.finish(options)


def timed(work: Callable[[], object]) -> None:
    """Work, and wait for the device."""
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
