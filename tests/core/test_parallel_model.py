"""One model on many layouts: initial weights, loss, gradients and their norm are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
from modelkit import config as model_config
from parallelkit import Layout, differences, full, laid_out

from forge_core.errors import ForgeError
from forge_core.testing.pool import WorkerPool

LIMIT = 1e-10
RING = {"cp": 2, "cp_attention": "ring"}
QK_BIAS = {"qk_norm": True, "attention_bias": True, "output_bias": True, "mlp_bias": True}


def run(layout: dict[str, Any], changes: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    return differences(Layout(**layout), changes, **options)


def check(
    pool: WorkerPool, layout: dict[str, Any], changes: dict[str, Any] | None = None, **options: Any
) -> None:
    limit = 240.0 if "compile" in layout else None
    for found in pool.run(run, layout, changes or {}, options, timeout=limit):
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
    "tp, dropout": ({"tp": 2}, {"dropout": 0.3}, {}),
    "tp without sequence parallel, dropout, recomputed": (
        {"tp": 2, "sequence_parallel": False, "recompute": "full"},
        {"dropout": 0.3},
        {},
    ),
    "tp, dropout, recomputed": ({"tp": 2, "recompute": "full"}, {"dropout": 0.3}, {}),
    "cp, dropout": ({"cp": 2}, {"dropout": 0.3}, {}),
    "cp, windows": ({"cp": 2}, {"sliding_window": 5, "layer_types": ["sliding", "full"]}, {}),
    "tp, windows and caps": ({"tp": 2}, {"sliding_window": 5, "attention_softcap": 2.0}, {}),
    "tp, norms after": ({"tp": 2}, {"block_norm": "sandwich", "norm_unit_offset": True}, {}),
    "tp, one norm over all heads": ({"tp": 2}, {"qk_norm": True, "qk_norm_over": "all_heads"}, {}),
    "tp, a length that does not divide": ({"tp": 2}, QK_BIAS, {"length": 15}),
    "tp, embeddings given": ({"tp": 2}, {}, {"parts": "embeds"}),
    "cp, embeddings given": ({"cp": 2}, {}, {"parts": "embeds"}),
    "tp, predicates and padding": ({"tp": 2}, {}, {"parts": "predicates", "padded": True}),
    "cp, predicates and padding": ({"cp": 2}, {}, {"parts": "predicates", "padded": True}),
    "cp, attention by document": ({"cp": 2}, {"attention": "documents"}, {}),
    "tp, a mixer without a plan": ({"tp": 2}, {}, {"parts": "mixer"}),
    "tp, an ffn with its own plan": ({"tp": 2}, {}, {"parts": "ffn"}),
    "cp, an ffn with its own plan": ({"cp": 2}, {}, {"parts": "ffn"}),
    "ring": (RING, {}, {}),
    "ring, one document a row": (RING, QK_BIAS, {"packed": False}),
    "ring, recomputed": ({**RING, "recompute": "full"}, {}, {}),
    "ring, recomputed by operator": ({**RING, "recompute": "selective"}, {}, {}),
    "ring, compiled": ({**RING, "compile": True}, {}, {}),
    "ring, compiled, recomputed": ({**RING, "compile": True, "recompute": "full"}, {}, {}),
    "ring, dropout": (RING, {"dropout": 0.3}, {}),
    "ring, windows": (RING, {"sliding_window": 5, "layer_types": ["sliding", "full"]}, {}),
    "ring, caps": (RING, {"attention_softcap": 2.0, "attention_scale": 0.2}, {}),
    "ring, predicates and padding": (RING, {}, {"parts": "predicates", "padded": True}),
    "replicas": ({"dp_replicate": 2}, {"tie_embeddings": True}, {"accumulate": 2}),
}


def cells(table: dict[str, Any]) -> list[Any]:
    """Names of the cases; compiling takes long, so one of those is enough for everyday."""
    dear = {name for name in table if "compiled" in name} - {"fsdp, compiled"}
    marks = (pytest.mark.slow, pytest.mark.timeout(300))
    return [pytest.param(name, marks=marks) if name in dear else name for name in table]


@pytest.mark.parametrize("name", cells(TWO))
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
    "ring of 4": ({**RING, "cp": 4}, QK_BIAS, {}),
    "ring x tp": ({**RING, "tp": 2}, QK_BIAS, {"packed": False}),
    "fsdp x ring": ({**RING, "dp_shard": 2}, {}, {"accumulate": 2}),
    "fsdp x tp, compiled, recomputed": (
        {"dp_shard": 2, "tp": 2, "compile": True, "recompute": "full"},
        QK_BIAS,
        {},
    ),
    "tp 4": ({"tp": 4}, {"n_kv_heads": 4}, {}),
}


@pytest.mark.parametrize("name", cells(FOUR))
def test_four_ranks_equal_one(pool4: WorkerPool, name: str) -> None:
    layout, changes, options = FOUR[name]
    check(pool4, layout, changes, **options)


def refusal() -> str:
    with pytest.raises(ForgeError) as caught:
        laid_out(model_config(), Layout(cp=2), parts="mixer")
    return str(caught.value)


def test_a_mixer_that_needs_the_whole_sequence_is_refused(pool2: WorkerPool) -> None:
    for message in pool2.run(refusal):
        assert "layers.0.attn (RunningMean)" in message


def filled() -> dict[str, list[float]]:
    """Norms and biases of a decoder that was divided on the meta device; its memory was NaN before."""
    decoder = laid_out(model_config(**QK_BIAS), Layout(tp=2))
    found = {name: full(p) for name, p in decoder.named_parameters() if p.ndim < 2}
    assert all(bool(full(p).isfinite().all()) for p in decoder.parameters())
    return {
        kind: sorted({float(v) for n, p in found.items() if kind in n for v in p})
        for kind in ("norm", "bias")
    }


def test_norms_start_at_one_and_biases_at_zero(pool2: WorkerPool) -> None:
    assert pool2.run(filled) == [{"norm": [1.0], "bias": [0.0]}] * 2
