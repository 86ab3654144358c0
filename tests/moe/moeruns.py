"""Whole runs with experts, on one process or in the workers of a pool, and what must be the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge_core.loop.naming import global_name
from forge_core.plugins import Plugins
from forge_core.testing import run_tiny, tiny_config
from forge_core.testing.pool import WorkerPool
from forge_moe.experts import local
from forge_moe.ffn import moe_layers

STEPS = 5
ROWS = 4
Tables = dict[str, dict[str, Any]]
COUNTED = (
    "moe/aux_loss",
    "moe/router_z_loss",
    "moe/expert_balance",
    "moe/router_entropy",
    "moe/layer1/max_load",
)


def run(tables: Tables, plugins: Plugins | None = None) -> dict[str, Any]:
    """What a run leaves behind, as plain data."""
    plugins = plugins or Plugins()
    done = run_tiny(tiny_config(plugins=plugins, **tables), plugins, steps=STEPS)
    layers = moe_layers(done.session.model)
    biases = {global_name(name): layer.router.expert_bias for name, layer in layers}
    return {
        "losses": done.losses,
        "objectives": done.objectives,
        "norms": done.grad_norms,
        "weights": dict(done.weights),
        "biases": {name: bias.clone() for name, bias in biases.items() if bias is not None},
        "metrics": {name: done.metric(name) for name in COUNTED},
        "eval": done.metric("eval/loss"),
        "flops": done.session.metrics.meter.flops_per_token,
        "held": sum(p.numel() for p in map(local, done.session.model.parameters())),
    }


def tables(ranks: int = 1, accumulate: int = 1, **more: dict[str, Any]) -> Tables:
    """A global batch of four rows, of `ranks` data ranks."""
    found: Tables = {
        "model": {"n_kv_heads": 2, "ffn_hidden_dim": 24},
        "moe": {
            "num_experts": 4,
            "top_k": 2,
            "shared_experts": 1,
            "bias_rate": 0.01,
            "aux_loss_weight": 0.3,
            "router_z_loss_weight": 0.1,
            "layer_metrics": True,
        },
        "train": {
            "dtype": "fp64",
            "batch_size": ROWS // ranks // accumulate,
            "grad_accum_steps": accumulate,
            "max_steps": STEPS,
        },
        "eval": {"steps": 2, "batch_size": 2},
    }
    for name, table in more.items():
        found[name] = {**found.get(name, {}), **table}
    return found


def same(found: dict[str, Any], expected: dict[str, Any], limit: float = 1e-10) -> None:
    for name in ("losses", "objectives", "norms", "eval"):
        assert found[name] == pytest.approx(expected[name], rel=limit, abs=limit), name
    for name, values in expected["metrics"].items():
        assert found["metrics"][name] == pytest.approx(values, rel=1e-9), name
    for name, weight in found["weights"].items():  # a stage has those of its layers
        torch.testing.assert_close(weight, expected["weights"][name], rtol=limit, atol=limit, msg=name)
    for name, bias in found["biases"].items():
        assert bias.equal(expected["biases"][name]), name


def same_on_all(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """What every rank found, and that together they have everything."""
    assert any(bias.any() for bias in expected["biases"].values())
    for found in ranks:
        same(found, expected)
    for kind in ("weights", "biases"):
        assert {name for found in ranks for name in found[kind]} == expected[kind].keys()


def check(pool: WorkerPool, one: Tables, many: Tables) -> None:
    same_on_all(pool.run(run, many, timeout=100), run(one))
