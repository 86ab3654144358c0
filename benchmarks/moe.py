"""Cost of experts: a step with 8, of which a token uses 2, beside a dense model of equal active FLOPs.

Each expert is half as wide as the dense MLP, so that both models multiply alike for a token. What a step
takes longer is the router, the sorting of tokens, more weights to update, and smaller products.

Further rows: how even the load is; the share of a step's time in routing and permutation; the peak memory of
a layer under skewed routing over that under even routing. Goals: see GOALS.

usage: python benchmarks/moe.py [--json] [--check] [--pairs N] [--dim N] [--threads N]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from _common import Goal, Report, arguments, paired

from forge_core.plugins import Plugins
from forge_core.testing import tiny_config

GOALS = {
    "step": Goal("step of 8 experts, top-2, over the dense one", 1.3),
    "skew": Goal("peak memory of a layer, all tokens to two experts over even load", 1.05),
}
LAYERS, HEADS, LENGTH, ROWS, VOCABULARY = 4, 8, 256, 8, 512


def session(stack: ExitStack, dim: int, experts: bool) -> Any:
    """A built session of one of the two models."""
    from forge_core.loop.build import build_session, new_session

    hidden = 4 * dim * 2 // 3 // 64 * 64
    plugins = Plugins()
    tables: dict[str, Any] = {
        "model": {
            "dim": dim,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "ffn_hidden_dim": hidden,
            "vocab_size": VOCABULARY,
        },
        "data": {"source": "synthetic", "synthetic": {"n_samples": 2048}},
        "train": {"batch_size": ROWS, "seq_len": LENGTH, "max_steps": 100000, "dtype": "fp32"},
        "eval": {"sample_tokens": 0},
        "metrics": {"log_interval": 1000},
        "optimizer": {"lr": 1e-6},  # random tokens teach nothing but to send all of them to the same experts
    }
    if experts:
        tables["moe"] = {"num_experts": 8, "top_k": 2, "expert_hidden_dim": hidden // 2}
    config = tiny_config(plugins=plugins, **tables)
    return build_session(new_session(config, plugins, stack))


def stepper(session: Any) -> Callable[[], None]:
    """Runs one update, as the loop does."""

    def step() -> None:
        session.step += 1
        result = session.step_fn.train(session, session.step)
        for after in session.after_updates:
            after(session.step, result.ok)

    return step


def routing_share(session: Any, steps: int) -> float:
    """Part of a step that goes to the router, to sorting, and to moving rows there and back.

    Every part with experts runs alone, forward and backward, with its experts replaced by the identity.
    """
    from forge_moe.ffn import moe_layers

    step = stepper(session)
    whole = min(_seconds(step) for _ in range(steps))
    layers = [layer for _, layer in moe_layers(session.model)]
    x = torch.randn(ROWS, LENGTH, layers[0].router.weight.shape[1], requires_grad=True)
    from forge_core.contract import LayerContext

    around = LayerContext()

    def bare() -> None:
        for layer in layers:
            layer(x, around).sum().backward()

    forwards = [layer.experts.forward for layer in layers]
    for layer in layers:
        layer.experts.forward = lambda rows, ends: rows
    alone = min(_seconds(bare) for _ in range(steps))
    for layer, forward in zip(layers, forwards, strict=True):
        layer.experts.forward = forward
    return alone / whole


def evenness(session: Any) -> float:
    """Least load of an expert over the largest in one update, in the worst layer."""
    from forge_moe.ffn import moe_layers

    session.step += 1
    session.step_fn.train(session, session.step)
    shares = []
    for _, layer in moe_layers(session.model):
        counts = layer.tally[: layer.moe.num_experts]
        shares.append(float(counts.min() / counts.max()))
        layer.tally.zero_()
    return min(shares)


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def peak(layer: Any, x: torch.Tensor) -> int:
    """Most bytes that tensors of one forward and backward take at a time."""
    from torch.profiler import ProfilerActivity, profile

    from forge_core.contract import LayerContext

    leaf = x.clone().requires_grad_()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        layer(leaf, LayerContext()).sum().backward()
    now = most = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def skew(session: Any) -> float:
    """Peak memory of a layer with all tokens at two experts, over that with even load."""
    from forge_moe.ffn import moe_layers

    _, layer = moe_layers(session.model)[0]
    dim = layer.router.weight.shape[1]
    x = torch.randn(ROWS, LENGTH, dim)
    x[..., 0] = 1.0
    found = []
    for forced in (False, True):
        with torch.no_grad():
            layer.router.weight.normal_(0, 0.02)
            if forced:
                layer.router.weight[:2, 0] = 100.0
        peak(layer, x)
        found.append(peak(layer, x))
    return found[1] / found[0]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--dim", type=int, default=512, help="width of the models")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = Report("moe", ["case", "value", "95 %", "goal"])
    with ExitStack() as stack:
        dense, sparse = session(stack, options.dim, False), session(stack, options.dim, True)
        found = paired(stepper(dense), stepper(sparse), options.pairs or 30, budget=400)
        report.ratio("step", GOALS["step"], found.ratio())
        report.value("least load over largest", None, evenness(sparse))
        report.value("share of routing and permutation", None, routing_share(sparse, 5))
        report.value("skew", GOALS["skew"], skew(sparse))
    report.finish(options)


if __name__ == "__main__":
    main()
