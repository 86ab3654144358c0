"""One model on many layouts: initial weights, loss, gradients and their norm are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
from parallelkit import Layout, differences

from forge_core.testing.pool import WorkerPool

LIMIT = 1e-10
QK_BIAS = {"qk_norm": True, "attention_bias": True, "output_bias": True, "mlp_bias": True}


def run(layout: dict[str, Any], changes: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    return differences(Layout(**layout), changes, **options)


def check(
    pool: WorkerPool, layout: dict[str, Any], changes: dict[str, Any] | None = None, **options: Any
) -> None:
    for found in pool.run(run, layout, changes or {}, options):
        assert all(value < LIMIT for value in found.values()), found


TWO = {
    "tp": ({"tp": 2}, {}, {}),
    "tp, biases and norms of heads": ({"tp": 2}, QK_BIAS, {}),
    "tp, tied": ({"tp": 2}, {"tie_embeddings": True}, {}),
    "tp, layer norm, two matrices": ({"tp": 2}, {"norm_type": "layernorm", "gated_mlp": False}, {}),
    "tp without sequence parallel": ({"tp": 2, "sequence_parallel": False}, QK_BIAS, {}),
    "tp, z-loss": ({"tp": 2}, {}, {"z": 0.1}),
    "tp, logits": ({"tp": 2}, {}, {"z": 0.1, "logits": True}),
    "cp": ({"cp": 2}, {}, {}),
    "cp, one document a row": ({"cp": 2}, QK_BIAS, {"packed": False}),
    "fsdp": ({"dp_shard": 2}, {}, {"accumulate": 3}),
    "fsdp, tied, kept": ({"dp_shard": 2, "reshard": False}, {"tie_embeddings": True}, {"evaluate": True}),
    "fsdp, offload": ({"dp_shard": 2, "offload": True}, {}, {}),
    "tp, recomputed": ({"tp": 2, "recompute": "full"}, QK_BIAS, {}),
    "tp, recomputed by operator": ({"tp": 2, "recompute": "selective"}, {}, {}),
    "cp, recomputed": ({"cp": 2, "recompute": "full"}, {}, {}),
    "fsdp, recomputed": ({"dp_shard": 2, "recompute": "full"}, {}, {"accumulate": 2}),
    "fsdp, recomputed by operator": ({"dp_shard": 2, "recompute": "selective"}, {}, {}),
    "fsdp, compiled": ({"dp_shard": 2, "compile": True}, {}, {}),
    "fsdp, compiled, recomputed": ({"dp_shard": 2, "compile": True, "recompute": "full"}, {}, {}),
    "fsdp, compiled, by operator": ({"dp_shard": 2, "compile": True, "recompute": "selective"}, {}, {}),
    "tp, compiled": ({"tp": 2, "compile": True}, {}, {}),
    "tp, compiled, recomputed": ({"tp": 2, "compile": True, "recompute": "full"}, {}, {}),
    "cp, compiled": ({"cp": 2, "compile": True}, {}, {}),
    "replicas": ({"dp_replicate": 2}, {"tie_embeddings": True}, {"accumulate": 2}),
}


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_equal_one(pool2: WorkerPool, name: str) -> None:
    layout, changes, options = TWO[name]
    check(pool2, layout, changes, **options)


FOUR = {
    "hsdp": ({"dp_replicate": 2, "dp_shard": 2}, {"tie_embeddings": True}, {"accumulate": 2}),
    "fsdp x tp": ({"dp_shard": 2, "tp": 2}, QK_BIAS, {"accumulate": 2}),
    "fsdp x tp, tied": ({"dp_shard": 2, "tp": 2}, {"tie_embeddings": True}, {"evaluate": True}),
    "fsdp x tp, no sequence parallel": ({"dp_shard": 2, "tp": 2, "sequence_parallel": False}, {}, {}),
    "fsdp x cp": ({"dp_shard": 2, "cp": 2}, QK_BIAS, {"accumulate": 2}),
    "cp x tp": ({"cp": 2, "tp": 2}, QK_BIAS, {}),
    "replicas x tp": ({"dp_replicate": 2, "tp": 2}, {}, {}),
    "cp 4": ({"cp": 4}, {}, {}),
    "tp 4": ({"tp": 4}, {"n_kv_heads": 4}, {}),
}


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_equal_one(pool4: WorkerPool, name: str) -> None:
    layout, changes, options = FOUR[name]
    check(pool4, layout, changes, **options)
