"""One GPU: a decoder of a billion parameters in bf16, compiled, beside a bare loop, in turns of a few steps.

Each side runs in a process of its own; both have their weights on the GPU all the time (about 17 GB each, and
activations: a device of 80 GB). BENCH_BATCH sets the sequences of 2048 tokens in a step (8). Where there is
no GPU it says so and measures nothing. Ends within 10 minutes.

usage: python benchmarks/gpu.py [--json] [--check] [--pairs N]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from _common import Goal, Report, arguments, interval
from _side import Side

WORKER = Path(__file__).with_name("_gpu_worker.py")
GOAL = Goal("1.04B-parameter step, bf16, compiled", 1.0)
STEPS_A_TURN, WARM_UP, BUDGET = 5, 2, 420.0


def measure(pairs: int) -> tuple[list[float], list[float]]:
    """Seconds a step of the bare loop and of Forge, pair by pair."""
    began = time.perf_counter()
    sides = {kind: Side(WORKER, kind) for kind in ("bare", "forge")}
    for kind, side in sides.items():
        print(f"{kind}: first step after {side.ready:.0f} s", file=sys.stderr, flush=True)
    found: dict[str, list[float]] = {kind: [] for kind in sides}
    for number in range(-WARM_UP, pairs):
        if time.perf_counter() - began > BUDGET:
            break
        for kind in sides if number % 2 else reversed(sides):
            seconds = sides[kind].take(STEPS_A_TURN) / STEPS_A_TURN
            if number >= 0:
                found[kind].append(seconds)
    for side in sides.values():
        side.close()
    return found["bare"], found["forge"]


def rates(seconds: list[float]) -> tuple[float, float]:
    """Tokens a second and MFU (0 on a device whose peak is not known) of the median step."""
    import torch
    from _gpu_worker import SIZE

    from forge_core.config.tables import ModelConfig
    from forge_core.metrics.peaks import peak_flops
    from forge_core.model.flops import flops_per_token

    model = ModelConfig(
        dim=SIZE["dim"],
        n_layers=SIZE["layers"],
        n_heads=SIZE["heads"],
        n_kv_heads=SIZE["kv"],
        head_dim=SIZE["dim"] // SIZE["heads"],
        vocab_size=SIZE["vocab"],
        ffn_hidden_dim=SIZE["hidden"],
        gated_mlp=True,
        max_seq_len=SIZE["seq"],
    )
    tokens = SIZE["mb"] * SIZE["accum"] * SIZE["seq"] / sorted(seconds)[len(seconds) // 2]
    peak = peak_flops(torch.cuda.get_device_name())
    return tokens, tokens * flops_per_token(model, SIZE["seq"]) / peak if peak else 0.0


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    import torch

    report = Report(
        "gpu", ["case", "bare tok/s", "forge tok/s", "bare MFU", "forge MFU", "ratio", "95 %", "goal"]
    )
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured", file=sys.stderr)
        report.finish(options)
        return
    bare, forge = measure(options.pairs or 20)
    (bare_tokens, bare_mfu), (forge_tokens, forge_mfu) = rates(bare), rates(forge)
    report.ratio(
        "1B dense, bf16",
        GOAL,
        interval([f / b for f, b in zip(forge, bare, strict=True)]),
        bare_tokens=bare_tokens,
        forge_tokens=forge_tokens,
        bare_mfu=bare_mfu,
        forge_mfu=forge_mfu,
    )
    report.finish(options)


if __name__ == "__main__":
    main()
