"""Runs on several ranks: losses, norms and final weights are those of one process, to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge_core.model.generate import generate
from forge_core.testing import run_tiny, tiny_config
from forge_core.testing.pool import WorkerPool

STEPS = 6
ROWS = 4
Tables = dict[str, dict[str, Any]]


def run(tables: Tables) -> dict[str, Any]:
    """What a run leaves behind, as plain data."""
    done = run_tiny(tiny_config(**tables), steps=STEPS)
    model: Any = done.session.model
    continued = generate(model, [[3, 1, 4, 1, 5], [9, 2]], max_new_tokens=5, temperature=0.0)
    return {
        "losses": done.losses,
        "norms": done.grad_norms,
        "weights": dict(done.weights),
        "eval": done.metric("eval/loss"),
        "continued": continued,
    }


def tables(ranks: int = 1, accumulate: int = 1, **more: dict[str, Any]) -> Tables:
    """A global batch of four rows, of `ranks` data ranks."""
    found: Tables = {
        "model": {"n_kv_heads": 2, "n_layers": 3},
        "train": {
            "dtype": "fp64",
            "batch_size": ROWS // ranks // accumulate,
            "grad_accum_steps": accumulate,
            "max_steps": STEPS,
        },
        "eval": {"interval": 2, "steps": 2, "batch_size": 2, "sample_tokens": 4},
    }
    for name, table in more.items():
        found[name] = {**found.get(name, {}), **table}
    return found


def check(pool: WorkerPool, one: Tables, many: Tables, limit: float = 1e-10) -> None:
    expected = run(one)
    for found in pool.run(run, many, timeout=120):
        for name in ("losses", "norms", "eval"):
            assert found[name] == pytest.approx(expected[name], rel=limit, abs=limit), name
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=limit, atol=limit)
        assert found["continued"] == expected["continued"]


TP = {"tp": 2}
MIXED = {"tp": 2, "sequence_parallel": False}
TIED = {"tie_embeddings": True, "qk_norm": True}


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "schedule_free_adamw"])
def test_every_optimizer_on_sharded_tensor_ranks(pool4: WorkerPool, name: str) -> None:
    more: Tables = {"optimizer": {"name": name}, "model": TIED}
    check(pool4, tables(**more), tables(2, **more, distributed=MIXED))


@pytest.mark.parametrize("name", ["adamw", "schedule_free_adamw"])
def test_tensor_ranks_alone(pool2: WorkerPool, name: str) -> None:
    more: Tables = {"optimizer": {"name": name}, "model": TIED}
    check(pool2, tables(**more), tables(**more, distributed=MIXED))


def test_accumulation_on_sharded_ranks(pool2: WorkerPool) -> None:
    check(pool2, tables(), tables(2, 2, train={"activation_checkpointing": "selective"}))
