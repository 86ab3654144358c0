"""Cost of the loss: fused with the head beside plain cross-entropy of full logits.

Time of forward and backward, paired; the most memory that they add to a fresh process that holds their inputs
(the operating system's peak, so that what the allocator and the matrix products take is in it); and how far
loss and gradients are from fp64.

usage: python benchmarks/loss.py [--json] [--check] [--pairs N] [--only time|memory|gradients]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from _common import Goal, Report, arguments, paired
from torch import Tensor

from forge_core.loss import IGNORE, CrossEntropy

THREADS = 2
DEADLINE = time.monotonic() + 540
"""No pair begins after it."""


@dataclass(frozen=True)
class Shape:
    """Tokens x dim x vocabulary."""

    tokens: int
    dim: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.tokens} x {self.dim} x {self.vocabulary}"


Given = tuple[Tensor, Tensor, Tensor, Tensor]
"""Hidden states, head, targets, and 1 / count of supervised tokens, which a loop knows before the forward."""

Z = 1e-4
LARGE = Shape(4096, 256, 128_000)
TIMED: dict[Shape, tuple[int, int, float | None]] = {
    Shape(64, 16, 64): (1, 200, None),  # calls, not work; the whole step has a goal in loop.py
    Shape(4096, 256, 512): (2, 4, None),
    Shape(2048, 256, 32_768): (2, 1, 1.05),
    LARGE: (2, 1, 1.05),
}
"""Shape -> threads, calls a turn, goal. Where nothing but calls costs, the token losses have a price."""
CHECKED = [Shape(1024, 256, 32_768), Shape(384, 256, 128_000)]


def inputs(shape: Shape, masked: float = 0.0) -> Given:
    """A share `masked` of the targets supervises nothing."""
    torch.manual_seed(0)
    hidden = torch.randn(1, shape.tokens, shape.dim).requires_grad_()
    weight = torch.randn(shape.vocabulary, shape.dim).mul_(shape.dim**-0.5).requires_grad_()
    targets = torch.randint(0, shape.vocabulary, (1, shape.tokens))
    targets[torch.rand(targets.shape) < masked] = IGNORE
    return hidden, weight, targets, 1 / (targets != IGNORE).sum()


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, z: float = 0.0) -> Tensor:
    """The token mean as one would write it."""
    logits = F.linear(hidden, weight).flatten(0, -2)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE)
    if z:
        normaliser = logits.logsumexp(-1)[targets.flatten() != IGNORE]
        loss = loss + z * normaliser.square().mean()
    return loss


def fused(hidden: Tensor, weight: Tensor, targets: Tensor, z: float = 0.0) -> Tensor:
    """The same by way of the sum and its token losses."""
    return LOSSES[z](hidden, weight, targets)[0]


LOSSES = {z: CrossEntropy(z_loss_weight=z) for z in (0.0, Z)}
SIDES: dict[str, Callable[..., Tensor]] = {"plain": plain, "fused": fused}


def update(side: str, given: Given, z: float = 0.0) -> Tensor:
    """Forward and backward into fresh gradients; the token mean."""
    hidden, weight, targets, share = given
    hidden.grad = weight.grad = None
    loss = SIDES[side](hidden, weight, targets, z)
    if side == "plain":
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()
    loss.backward(share)  # type: ignore[no-untyped-call]
    return loss.detach() * share


def measure_time(report: Report, pairs: int | None) -> None:
    for shape, (threads, repeat, limit) in TIMED.items():
        torch.set_num_threads(threads)
        given = inputs(shape)
        found = paired(
            lambda given=given: update("plain", given),  # type: ignore[misc]
            lambda given=given: update("fused", given),  # type: ignore[misc]
            pairs or (30 if repeat > 1 else 20),
            repeat=repeat,
            warm_up=1 if shape is LARGE else 3,
            budget=DEADLINE - time.monotonic(),
        )
        report.ratio(
            f"time {shape}",
            None if limit is None else Goal("forward and backward over plain cross-entropy", limit),
            found.ratio(),
            plain_seconds=sorted(found.first)[len(found.first) // 2],
            fused_seconds=sorted(found.second)[len(found.second) // 2],
        )


def peak_bytes(side: str) -> int:
    """In a fresh process: bytes that one update at the large shape adds to the inputs at its peak."""
    command = [sys.executable, __file__, "--peak-of", side]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent)
    return int(json.loads(done.stdout))


def report_peak(side: str) -> None:
    """The child of `peak_bytes`: warm up on a small shape, so that libraries are loaded, then measure."""
    torch.set_num_threads(THREADS)
    update(side, inputs(Shape(64, 16, 20_000)))
    given = inputs(LARGE)
    before = _resident("VmRSS")
    update(side, given)
    print(_resident("VmHWM") - before)


def _resident(field: str) -> int:
    """Bytes of this process that are in memory (VmRSS) or were at most (VmHWM); Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def measure_memory(report: Report) -> None:
    """The goal is relative to the logits alone, which is less than what their loss takes."""
    logits = LARGE.tokens * LARGE.vocabulary * 4
    peaks = {side: peak_bytes(side) for side in SIDES}
    columns = {f"{side}_bytes": float(peak) for side, peak in peaks.items()}
    report.value(
        f"peak {LARGE}, over plain",
        Goal("peak over plain", 1 / 8),
        peaks["fused"] / peaks["plain"],
        **columns,
    )
    report.value(
        f"peak {LARGE}, over logits", Goal("peak over logits", 1 / 8), peaks["fused"] / logits, **columns
    )


def measure_gradients(report: Report) -> None:
    """Largest error against fp64, relative to the largest entry: of the loss and of both gradients."""
    torch.set_num_threads(THREADS)
    for shape in CHECKED:
        for what, masked, z in (
            ("", 0.0, 0.0),
            (", z-loss", 0.0, Z),
            (", 30 % masked, z-loss", 0.3, Z),
        ):
            given = inputs(shape, masked)
            hidden, weight, targets, share = given
            exact = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
            expected = results("plain", (*exact, targets, share), z)
            errors = {side: error(results(side, given, z), expected) for side in SIDES}
            report.value(
                f"gradients {shape}{what}",
                Goal("relative error against fp64", 1e-5),
                errors["fused"],
                plain_error=errors["plain"],
                fused_error=errors["fused"],
            )
    given = inputs(LARGE)
    apart = error(results("fused", given), results("plain", given))
    goal = Goal("relative distance from plain fp32", 1e-5)
    report.value(f"gradients {LARGE}, fused from plain", goal, apart, plain_error=0.0, fused_error=apart)


def results(side: str, given: Given, z: float = 0.0) -> tuple[Tensor | None, ...]:
    """Loss and gradients of one update."""
    return update(side, given, z), given[0].grad, given[1].grad


def error(found: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> float:
    """The largest difference, each relative to the largest entry of what is expected."""
    differences = []
    for a, b in zip(found, expected, strict=True):
        assert a is not None
        assert b is not None
        differences.append(float((a - b).abs().max() / b.abs().max()))
    return max(differences)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=["time", "memory", "gradients"], action="append", help="just this")
    parser.add_argument("--peak-of", choices=sorted(SIDES), help="used by the benchmark itself")
    options = parser.parse_args()
    if options.peak_of:
        report_peak(options.peak_of)
        return
    report = Report("loss", ["tokens x dim x vocabulary", "plain", "fused", "fused / plain", "95 %", "goal"])
    parts = options.only or ["gradients", "memory", "time"]
    if "gradients" in parts:
        measure_gradients(report)
    if "memory" in parts:
        measure_memory(report)
    if "time" in parts:
        measure_time(report, options.pairs)
    report.finish(options)


if __name__ == "__main__":
    main()
