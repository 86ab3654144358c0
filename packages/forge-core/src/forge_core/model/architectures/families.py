"""Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3 (text), OLMo 2 and 3: what each says in its config.json.

Defaults are those of the family's configuration class: files leave out what equals them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_core.config.config import Config
from forge_core.config.tables import ModelConfig
from forge_core.contract.architecture import Architecture, TensorRule
from forge_core.errors import ForgeError
from forge_core.model.architectures.defaults import DEFAULTS
from forge_core.model.architectures.rope import FULL, SLIDING, read_rope, write_rope
from forge_core.model.architectures.rules import IGNORED, decoder_rules
from forge_core.model.architectures.table import common_config, common_keys, faithful, layer_types
from forge_core.model.dimensions import slides

HF = Mapping[str, Any]
Tables = dict[str, dict[str, Any]]


def _biases(config: HF) -> dict[str, Any]:
    """`attention_bias` of most families: all four projections."""
    bias = bool(config.get("attention_bias", False))
    return {"attention_bias": bias, "output_bias": bias}


def _read_llama(config: HF) -> Tables:
    keys = {**common_keys(config), **read_rope(config), **_biases(config)}
    return {"model": {**keys, "mlp_bias": bool(config.get("mlp_bias", False))}}


def _read_mistral(config: HF) -> Tables:
    keys = {**common_keys(config), **read_rope(config)}
    return {"model": {**keys, **layer_types(config, lambda _: config.get("sliding_window") is not None)}}


def _read_qwen(config: HF) -> dict[str, Any]:
    keys = {**common_keys(config), **read_rope(config)}
    if config.get("use_sliding_window", False) and config.get("sliding_window") is not None:
        first = config.get("max_window_layers", 28)
        keys |= layer_types(config, lambda i: bool(i >= first))
    return keys


def _read_qwen2(config: HF) -> Tables:
    return {"model": {**_read_qwen(config), "attention_bias": True, "output_bias": False}}


def _read_qwen3(config: HF) -> Tables:
    head_dim = config.get("head_dim") or 128
    return {"model": {**_read_qwen({**config, "head_dim": head_dim}), **_biases(config), "qk_norm": True}}


def _gemma_keys(config: HF) -> dict[str, Any]:
    """What all Gemmas share. "gelu" in early files means the tanh form, which they were trained with."""
    if config.get("use_bidirectional_attention"):
        raise ForgeError("use_bidirectional_attention is not offered: this decoder is causal")
    activation = config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh"
    activation = "gelu_pytorch_tanh" if activation == "gelu" else activation
    filled = {"head_dim": 256, **config, "hidden_activation": activation}
    keys = common_keys(filled, tied=True)
    return {**keys, **_biases(config), "norm_unit_offset": True, "embedding_scale": keys["dim"] ** 0.5}


def _read_gemma(config: HF) -> Tables:
    return {"model": {**_gemma_keys(config), **read_rope(config)}}


def _read_gemma2(config: HF) -> Tables:
    filled = {
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        **config,
    }
    keys = {**_gemma_keys(filled), **read_rope(filled), **_gemma_scores(filled)}
    return {"model": {**keys, **layer_types(filled, lambda i: i % 2 == 0)}}


def _gemma_scores(config: HF) -> dict[str, Any]:
    caps = {
        "attention_softcap": config.get("attn_logit_softcapping"),
        "logit_softcap": config.get("final_logit_softcapping"),
    }
    scale = config.get("query_pre_attn_scalar", 256) ** -0.5
    found = {name: float(cap) for name, cap in caps.items() if cap is not None}
    return {"block_norm": "sandwich", "attention_scale": scale, **found}


def _read_gemma3(config: HF) -> Tables:
    if config.get("attn_logit_softcapping") is not None:
        raise ForgeError("attn_logit_softcapping is not offered: the class of this family passes it over")
    filled = {"sliding_window": 4096, **config}
    keys = {**_gemma_keys(filled), **_gemma_scores(filled), "qk_norm": True}
    every = config.get("sliding_window_pattern") or 6
    keys |= layer_types(filled, lambda i: bool((i + 1) % every))
    rope = read_rope(filled, 1_000_000.0)
    rope.setdefault("rope_theta_sliding", 10_000.0)
    if "sliding_window" not in keys:
        del rope["rope_theta_sliding"]
    return {"model": {**keys, **rope}}


def _olmo_keys(config: HF) -> dict[str, Any]:
    keys = {**common_keys(config, eps=1e-5), **_biases(config)}
    return {**keys, "block_norm": "post", "qk_norm": True, "qk_norm_over": "all_heads"}


def _read_olmo2(config: HF) -> Tables:
    return {"model": {**_olmo_keys(config), **read_rope(config)}}


def _read_olmo3(config: HF) -> Tables:
    """Positions are stretched in full layers alone, so that sliding layers keep the base as their own."""
    filled = {"sliding_window": 4096, **config}
    keys = {**_olmo_keys(filled), **layer_types(filled, lambda i: bool((i + 1) % 4))}
    rope = read_rope(filled, 500_000.0)
    if "sliding_window" in keys:
        rope.setdefault("rope_theta_sliding", rope["rope_theta"])
    else:
        rope.pop("rope_theta_sliding", None)
    return {"model": {**keys, **rope}}


def _write_common(model: ModelConfig) -> dict[str, Any]:
    return {**common_config(model), "attention_bias": model.attention_bias}


def _types(model: ModelConfig) -> list[str]:
    return [SLIDING if slides(model, i) else FULL for i in range(model.n_layers)]


def _write_llama(model: ModelConfig) -> dict[str, Any]:
    return {**_write_common(model), **write_rope(model), "mlp_bias": model.mlp_bias}


def _write_mistral(model: ModelConfig) -> dict[str, Any]:
    return {**_write_common(model), **write_rope(model), "sliding_window": model.sliding_window}


def _write_qwen(model: ModelConfig) -> dict[str, Any]:
    keys = {**_write_common(model), **write_rope(model), "layer_types": _types(model)}
    first = keys["layer_types"].index(SLIDING) if SLIDING in keys["layer_types"] else model.n_layers
    uses = model.sliding_window is not None
    return {
        **keys,
        "use_sliding_window": uses,
        "sliding_window": model.sliding_window,
        "max_window_layers": first,
    }


def _write_gemma(model: ModelConfig) -> dict[str, Any]:
    keys = {**_write_common(model), **write_rope(model)}
    return {**keys, "hidden_activation": keys["hidden_act"]}


def _write_gemma2(model: ModelConfig) -> dict[str, Any]:
    scale = model.attention_scale or (model.head_dim or 1) ** -0.5
    return {
        **_write_gemma(model),
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": model.attention_softcap,
        "final_logit_softcapping": model.logit_softcap,
        "sliding_window": model.sliding_window or 4096,
        "layer_types": _types(model),
    }


def _write_gemma3(model: ModelConfig) -> dict[str, Any]:
    keys = {**_write_gemma2(model), **write_rope(model, by_layer=True)}
    return {**keys, "attn_logit_softcapping": None}


def _write_olmo2(model: ModelConfig) -> dict[str, Any]:
    return {**_write_common(model), **write_rope(model)}


def _write_olmo3(model: ModelConfig) -> dict[str, Any]:
    keys = {**_write_common(model), **write_rope(model, by_layer=True)}
    return {**keys, "sliding_window": model.sliding_window or 4096, "layer_types": _types(model)}


def _rules(config: Config) -> list[TensorRule]:
    return decoder_rules(config[ModelConfig])


def _dense(name: str, class_name: str, read: Any, write: Any) -> Architecture:
    return Architecture(
        class_name=class_name,
        read=read,
        write=faithful(name, write, read),
        rules=_rules,
        ignored=IGNORED,
        text=True,
        defaults=DEFAULTS[name],
    )


ARCHITECTURES: dict[str, Architecture] = {
    name: _dense(name, class_name, read, write)
    for name, class_name, read, write in (
        ("llama", "LlamaForCausalLM", _read_llama, _write_llama),
        ("qwen2", "Qwen2ForCausalLM", _read_qwen2, _write_qwen),
        ("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_qwen),
        ("mistral", "MistralForCausalLM", _read_mistral, _write_mistral),
        ("gemma", "GemmaForCausalLM", _read_gemma, _write_gemma),
        ("gemma2", "Gemma2ForCausalLM", _read_gemma2, _write_gemma2),
        ("gemma3_text", "Gemma3ForCausalLM", _read_gemma3, _write_gemma3),
        ("olmo2", "Olmo2ForCausalLM", _read_olmo2, _write_olmo2),
        ("olmo3", "Olmo3ForCausalLM", _read_olmo3, _write_olmo3),
    )
}
"""By `model_type`; an export that is told none takes the first that has words for the model."""
