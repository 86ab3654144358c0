"""Dense families against transformers: logits both ways and greedy generation, on tiny random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from paritykit import (
    SIZES,
    TEXT,
    assert_close,
    batch,
    exported,
    loaded,
    logits_of,
    ours,
    random_model,
    randomise,
)

from forge_ckpt.hf.exporting import export_hf
from forge_ckpt.hf.opening import open_model
from forge_core.model.generate import generate

transformers = pytest.importorskip("transformers")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, all biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5},
    ),
    "llama, head_dim, one key head": ("llama", {"head_dim": 16, "num_key_value_heads": 1}),
    "llama, linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    ),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2, late windows": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, biases": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma 2": (
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma 3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
}
"""`model_type` and what its configuration says beside the sizes."""

each_family = pytest.mark.parametrize("family", FAMILIES)


def theirs(family: str) -> Any:
    name, keys = FAMILIES[family]
    return random_model(TEXT, name, **{**SIZES, **keys})


@each_family
def test_import_gives_the_logits_and_text_of_transformers(family: str, tmp_path: Path) -> None:
    model = theirs(family)
    model.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    decoder = ours(open_model(tmp_path / "hf"))
    assert_close(logits_of(decoder), logits_of(model))
    prompt = batch(1, 9)
    tokens = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert generate(decoder, prompt.tolist(), max_new_tokens=12, temperature=0) == tokens[:, 9:].tolist()


@each_family
def test_export_gives_transformers_the_logits_and_text_of_ours(family: str, tmp_path: Path) -> None:
    """Our decoder with other random weights, written and loaded by `from_pretrained`."""
    theirs(family).save_pretrained(tmp_path / "hf")
    opened = open_model(tmp_path / "hf")
    decoder = ours(opened)
    randomise(decoder, 3)
    name = FAMILIES[family][0]
    assert exported(opened, decoder, tmp_path / "out", model_type=name, max_shard_size="40KB") == name
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    model = loaded(TEXT, tmp_path / "out")
    assert_close(logits_of(decoder), logits_of(model))
    prompt = batch(1, 9)
    tokens = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert generate(decoder, prompt.tolist(), max_new_tokens=12, temperature=0) == tokens[:, 9:].tolist()


@each_family
def test_a_config_in_either_form_gives_transformers_one_model(family: str, tmp_path: Path) -> None:
    """config.json has what release 4 and release 5 read; each alone must mean the same."""
    theirs(family).save_pretrained(tmp_path / "hf")
    opened = attrs.evolve(open_model(tmp_path / "hf"), tokenizer=None)
    export_hf(opened, tmp_path / "out", model_type=FAMILIES[family][0])
    path = tmp_path / "out/config.json"
    both = json.loads(path.read_text())
    assert both["dtype"] == both["torch_dtype"] == "float32"
    found = []
    for left_out in ((), ("rope_scaling", "rope_theta", "rope_local_base_freq"), ("rope_parameters",)):
        path.write_text(json.dumps({k: v for k, v in both.items() if k not in left_out}))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", attn_implementation="eager"
        )
        found.append(logits_of(model.eval()))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    if FAMILIES[family][0] != "olmo3":  # release 5 gives its sliding layers another base than release 4 did
        torch.testing.assert_close(found[2], found[0], rtol=0, atol=0)
