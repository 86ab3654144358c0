"""Families with experts against transformers: logits both ways and greedy text, on tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paritykit
import pytest
from paritykit import TEXT, assert_close, batch, exported, loaded, logits_of, ours, random_model, randomise
from torch import Tensor

pytest.importorskip("transformers")
pytestmark = pytest.mark.packages("ckpt", "moe")

SIZES = {**paritykit.SIZES, "num_experts_per_tok": 2}
QWEN = {"num_experts": 6, "moe_intermediate_size": 20}
MLA = {**paritykit.MLA, "n_shared_experts": 2}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral, window": (
        "mixtral",
        {"num_local_experts": 4, "sliding_window": 5, "tie_word_embeddings": True},
    ),
    "qwen 2": ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 28}),
    "qwen 2, some layers": (
        "qwen2_moe",
        {
            **QWEN,
            "shared_expert_intermediate_size": 28,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "qkv_bias": False,
        },
    ),
    "qwen 3": ("qwen3_moe", {**QWEN, "head_dim": 16, "norm_topk_prob": True}),
    "qwen 3, dense layers": (
        "qwen3_moe",
        {**QWEN, "head_dim": 8, "mlp_only_layers": [1], "attention_bias": True},
    ),
    "olmoe": ("olmoe", {"num_experts": 5}),
    "olmoe, renormalised": ("olmoe", {"num_experts": 5, "norm_topk_prob": True}),
    "deepseek v3": ("deepseek_v3", MLA),
    "deepseek v3, one group": (
        "deepseek_v3",
        {
            **MLA,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "norm_topk_prob": False,
        },
    ),
    "deepseek v3, biases": ("deepseek_v3", {**MLA, "attention_bias": True}),
    "deepseek v3, yarn": ("deepseek_v3", {**MLA, "rope_parameters": YARN}),
}
"""`model_type` and what its configuration says beside the sizes."""

each_family = pytest.mark.parametrize("family", FAMILIES)


def theirs(family: str) -> Any:
    name, keys = FAMILIES[family]
    return random_model(TEXT, name, **{**SIZES, **keys})


def greedy(model: Any, prompt: Tensor) -> list[list[int]]:
    from forge_core.model.generate import generate

    found: list[list[int]] = generate(model, prompt.tolist(), max_new_tokens=8, temperature=0)
    return found


@each_family
def test_import_gives_the_logits_and_text_of_transformers(family: str, tmp_path: Path) -> None:
    from forge_ckpt.hf.opening import open_model

    model = theirs(family)
    model.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    mine = ours(open_model(tmp_path / "hf"))
    assert_close(logits_of(mine), logits_of(model))
    tokens = model.generate(batch(1, 9), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert greedy(mine, batch(1, 9)) == tokens[:, 9:].tolist()


@each_family
def test_export_gives_transformers_the_logits_of_ours(family: str, tmp_path: Path) -> None:
    """Our model with other random weights, written and loaded by `from_pretrained`."""
    from forge_ckpt.hf.opening import open_model

    theirs(family).save_pretrained(tmp_path / "hf")
    opened = open_model(tmp_path / "hf")
    mine = ours(opened)
    randomise(mine, 3)
    assert exported(opened, mine, tmp_path / "out") == FAMILIES[family][0]
    assert_close(logits_of(mine), logits_of(loaded(TEXT, tmp_path / "out")))


@pytest.mark.parametrize("family", ["mixtral", "qwen 3", "deepseek v3"])
def test_files_as_transformers_holds_them_in_memory(family: str, tmp_path: Path) -> None:
    from forge_ckpt.hf.opening import open_model

    model = theirs(family)
    model.save_pretrained(tmp_path / "hf", save_original_format=False)
    assert_close(logits_of(ours(open_model(tmp_path / "hf"))), logits_of(model))
