"""FLOPs against counts by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest
from modelkit import config

from forge_core.config.tables import ModelConfig
from forge_core.errors import ForgeError
from forge_core.model import build_decoder, default_parts
from forge_core.model.flops import flops_per_token, matrix_parameters_per_token
from forge_core.testing import run_tiny, tiny_config

SMALL = {
    "dim": 4,
    "n_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 1,
    "head_dim": 2,
    "vocab_size": 16,
    "ffn_hidden_dim": 8,
}


@pytest.mark.parametrize(
    ("changes", "by_hand"),
    [
        # a layer: q and o 4*4, k and v 4*2, three of 4*8; the head 4*16
        ({}, 2 * (16 + 8 + 8 + 16 + 3 * 32) + 64),
        ({"tie_embeddings": True}, 352),
        ({"gated_mlp": False}, 352 - 2 * 32),
        ({"n_kv_heads": 2}, 352 + 2 * 2 * 8),
        ({"head_dim": 6}, 352 + 2 * (2 * 32 + 2 * 16)),
        ({"qk_norm": True, "attention_bias": True, "mlp_bias": True}, 352),
    ],
)
def test_matrix_parameters(changes: dict[str, object], by_hand: int) -> None:
    assert matrix_parameters_per_token(config(**{**SMALL, **changes})) == by_hand


def test_flops() -> None:
    model = config(**SMALL)
    assert matrix_parameters_per_token(model) == 352
    assert flops_per_token(model, 8, causal=False) == 2112 + 768
    assert flops_per_token(model, 8) == 2112 + 384
    assert flops_per_token(model, 16) == 2112 + 768


def test_matrices_of_a_model_are_those_counted() -> None:
    model = config()
    built = build_decoder(model, default_parts(model))
    matrices = sum(
        p.numel() for name, p in built.named_parameters() if p.ndim == 2 and name != "embed.weight"
    )
    assert matrix_parameters_per_token(model) == matrices


def test_an_unresolved_table_is_refused() -> None:
    with pytest.raises(ForgeError, match="not resolved"):
        flops_per_token(ModelConfig(), 8)


def test_counting_imports_no_torch() -> None:
    code = "import sys, forge_core.model.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_frozen_matrix_costs_no_gradient_of_its_own() -> None:
    """Of 352 weights a token, 2 * (48 + 96) are the blocks' and 64 the head's; frozen ones count 4, not 6."""
    stages = [{"start_step": 3, "modules": ["head"]}]
    for ends, spared in ((1, 288), (3, 64)):
        tables = {"model": SMALL, "train": {"seq_len": 8, "max_steps": ends}}
        run = run_tiny(tiny_config(freeze={"modules": ["blocks"], "stages": stages}, **tables))
        assert run.session.metrics.meter.flops_per_token == 2496 - 2 * spared
