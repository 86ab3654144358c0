"""Configurations of Hugging Face's dense families, read and written. Expected tables are put down by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from forge_core.config.config import Config
from forge_core.config.tables import ModelConfig, RopeScalingConfig
from forge_core.contract import UnsuitedError
from forge_core.contract.architecture import permute, rename, split, stack
from forge_core.errors import ForgeError
from forge_core.model.architectures import ARCHITECTURES, decoder_rules, differences
from forge_core.plugins import Plugins

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
"""What every file says."""


def table(keys: dict[str, Any]) -> ModelConfig:
    scaling = RopeScalingConfig(**keys.get("rope_scaling", {}))
    return ModelConfig(**{**keys, "rope_scaling": scaling})


def read(name: str, **keys: Any) -> ModelConfig:
    return table(ARCHITECTURES[name].read({**SIZES, **keys})["model"])


def write(name: str, model: ModelConfig) -> dict[str, Any]:
    return ARCHITECTURES[name].write(Config({"model": model}))


def biases(model: ModelConfig) -> tuple[bool, bool, bool]:
    return model.attention_bias, model.output_bias, model.mlp_bias


def test_llama_as_release_4_wrote_it() -> None:
    model = read(
        "llama",
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
    )
    assert (model.dim, model.n_layers, model.n_heads, model.n_kv_heads, model.head_dim) == (32, 4, 4, 2, 8)
    assert (model.vocab_size, model.ffn_hidden_dim, model.max_seq_len) == (64, 48, 128)
    assert (model.norm_eps, model.rope_theta, model.tie_embeddings) == (1e-5, 500000.0, True)
    scaling = RopeScalingConfig(type="llama3", factor=8.0, original_max_seq_len=64)
    assert model.rope_scaling == scaling
    assert (model.gated_mlp, model.activation, model.qk_norm) == (True, "silu", False)
    assert biases(model) == (False, False, False)


def test_both_forms_of_rotary_positions_mean_the_same() -> None:
    old = read("llama", rope_theta=20.0, rope_scaling={"type": "linear", "factor": 2})
    new = read("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 20.0})
    assert old == new
    assert new.rope_scaling.type == "linear"
    yarn = read("llama", rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 10.0})
    assert yarn.rope_scaling.original_max_seq_len == 128, "the length of the model where none is given"


def test_what_files_leave_out_is_the_family_s_default() -> None:
    assert read("llama").norm_eps == 1e-6
    assert read("olmo2").norm_eps == 1e-5
    assert not read("llama").tie_embeddings
    assert read("gemma").tie_embeddings
    assert read("gemma3_text").rope_theta == 1e6
    assert read("gemma3_text").rope_theta_sliding == 1e4
    assert read("olmo3").rope_theta == 5e5
    assert read("gemma2").attention_scale == 256**-0.5
    assert (read("gemma2").attention_softcap, read("gemma2").logit_softcap) == (50.0, 30.0)


def test_biases() -> None:
    llama = read("llama", attention_bias=True, mlp_bias=True)
    assert biases(llama) == (True, True, True)
    assert biases(read("qwen2")) == (True, False, False)
    assert biases(read("qwen3", attention_bias=True)) == (True, True, False)


def test_windows() -> None:
    assert read("mistral", sliding_window=None).sliding_window is None
    mistral = read("mistral", sliding_window=16)
    assert (mistral.sliding_window, mistral.layer_types) == (16, [])
    assert read("gemma2", sliding_window=16).layer_types == ["sliding", "full"]
    assert read("gemma3_text", num_hidden_layers=7).layer_types == ["sliding"] * 5 + ["full"]
    assert read("olmo3").layer_types == ["sliding"] * 3 + ["full"]
    assert read("qwen2", sliding_window=16).sliding_window is None, "use_sliding_window is off"
    late = read("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=3)
    assert late.layer_types == ["full", "full", "full", "sliding"]
    early = read("gemma3_text", sliding_window_pattern=2)
    assert early.layer_types == ["sliding", "full"]


def test_gemma() -> None:
    early = read("gemma", hidden_act="gelu", hidden_activation=None)
    assert early.activation == "gelu_tanh"
    assert early.embedding_scale == pytest.approx(32**0.5)
    assert early.norm_unit_offset
    third = read("gemma3_text", query_pre_attn_scalar=16)
    assert (third.block_norm, third.qk_norm, third.qk_norm_over) == ("sandwich", True, "head")
    assert (third.attention_scale, third.attention_softcap, third.logit_softcap) == (0.25, None, None)


def test_olmo() -> None:
    model = read("olmo2")
    assert (model.block_norm, model.qk_norm, model.qk_norm_over) == ("post", True, "all_heads")
    scaled = read("olmo3", rope_theta=9.0, rope_scaling={"rope_type": "yarn", "factor": 8.0})
    assert (scaled.rope_theta, scaled.rope_theta_sliding, scaled.rope_scaling.type) == (9.0, 9.0, "yarn")


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("llama", {"hidden_act": "xielu"}, "activation 'xielu'"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "type 'longrope'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "causal"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("gemma2", {"sliding_window": None}, "no sliding_window"),
    ],
)
def test_what_is_not_offered_is_named(name: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ForgeError, match=words):
        read(name, **keys)


def test_a_key_that_is_missing_is_named() -> None:
    with pytest.raises(ForgeError, match="does not say hidden_size"):
        ARCHITECTURES["llama"].read({key: value for key, value in SIZES.items() if key != "hidden_size"})


EXAMPLES: dict[str, dict[str, Any]] = {
    "llama": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "mistral": {"sliding_window": 16},
    "qwen2": {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 144},
    "gemma3_text": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "olmo2": {},
    "olmo3": {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}},
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_written_reads_back_as_the_same_model(name: str) -> None:
    model = read(name, **EXAMPLES[name])
    written = json.loads(json.dumps(write(name, model)))
    assert differences(table(ARCHITECTURES[name].read(written)["model"]), model) == []
    old = {key: value for key, value in written.items() if key != "rope_parameters"}
    assert differences(table(ARCHITECTURES[name].read(old)["model"]), model) == [], "as release 4 reads it"
    new = {key: value for key, value in written.items() if key not in ("rope_scaling", "rope_theta")}
    assert differences(table(ARCHITECTURES[name].read(new)["model"]), model) == []


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"qk_norm": True}, "model.qk_norm = True"),
        ("llama", {"sliding_window": 8}, "model.sliding_window = 8"),
        ("llama", {"attention_bias": True}, "attention_bias|output_bias"),
        ("llama", {"norm_type": "layernorm"}, "model.norm_type = layernorm"),
        ("llama", {"gated_mlp": False}, "model.gated_mlp = False"),
        ("qwen2", {"attention_bias": False}, "model.attention_bias"),
        ("gemma2", {"embedding_scale": 2.0}, "model.embedding_scale = 2.0"),
        ("gemma2", {"attention_scale": 0.3}, "model.attention_scale = 0.3"),
        ("gemma", {"activation": "gelu"}, "model.activation = gelu"),
        ("gemma3_text", {"attention_softcap": 2.0}, r"model\.attention_softcap = 2\.0"),
        ("olmo2", {"block_norm": "pre"}, "model.block_norm = pre"),
    ],
)
def test_a_family_refuses_a_model_it_has_no_words_for(name: str, changes: dict[str, Any], words: str) -> None:
    keys = ARCHITECTURES[name].read(SIZES)["model"]
    with pytest.raises(UnsuitedError, match=words):
        write(name, table({**keys, **changes}))


def test_keys_of_training_are_no_difference() -> None:
    model = read("llama")
    trained = table({**ARCHITECTURES["llama"].read(SIZES)["model"], "dropout": 0.1, "attention": "mask"})
    assert differences(model, trained) == []


def test_names_of_tensors() -> None:
    rules = decoder_rules(read("gemma2"))
    names = {rule.theirs[0]: rule.ours[0] for rule in rules}
    layer = "model.layers.{layer}."
    assert names["model.embed_tokens.weight"] == "embed.weight"
    assert names[f"{layer}self_attn.o_proj.weight"] == "layers.{layer}.attn.o_proj.weight"
    assert names[f"{layer}post_attention_layernorm.weight"] == "layers.{layer}.attn_post_norm.weight"
    assert names[f"{layer}pre_feedforward_layernorm.weight"] == "layers.{layer}.mlp_norm.weight"
    plain = {
        rule.theirs[0]: rule.ours[0] for rule in decoder_rules(read("llama"), theirs="lm.", ours="decoder.")
    }
    assert (
        plain["lm.layers.{layer}.post_attention_layernorm.weight"] == "decoder.layers.{layer}.mlp_norm.weight"
    )
    assert len({*names.values()}) == len(names)


def test_rules_are_made_by_functions() -> None:
    assert rename("a", "b").kind == "rename"
    assert split("qkv", ("q", "k", "v"), (8, 4, 4)).sizes == (8, 4, 4)
    assert stack("{layer}.e.{expert}.w", "{layer}.w", 8).over == "expert"
    with pytest.raises(ValueError, match="needs one word in braces"):
        stack("{layer}.w", "{layer}.w", 8)
    assert permute("a", "b", (1, 0)).order == (1, 0)


def test_the_core_answers_the_hook() -> None:
    found = {c.value[0]: c.plugin for c in Plugins.isolated().collect("forge_architectures")}
    assert found == dict.fromkeys(ARCHITECTURES, "core")


def test_no_torch_is_imported() -> None:
    code = "import sys, forge_core.model.architectures; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
