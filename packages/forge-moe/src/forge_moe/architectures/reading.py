"""What families with experts say in config.json, as our tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from forge_core.errors import ForgeError
from forge_core.model.architectures import common_keys, given, layer_types, read_rope

HF = Mapping[str, Any]
Tables = dict[str, dict[str, Any]]


def _softmax(
    config: HF, *, experts: Any, top_k: int, width: int, renormalise: bool, coefficient: float
) -> dict[str, Any]:
    """`[moe]` of the families with a softmax router. Their balance loss is not divided by k, ours is."""
    k = int(given(config, "num_experts_per_tok", top_k))
    return {
        "num_experts": experts,
        "top_k": k,
        "router": "softmax",
        "expert_hidden_dim": width,
        "softmax": {"renormalise": renormalise},
        "aux_loss_weight": float(given(config, "router_aux_loss_coef", coefficient)) * k,
    }


def read_mixtral(config: HF) -> Tables:
    filled = {"num_key_value_heads": 8, **config}
    keys = {**common_keys(filled, eps=1e-5), **read_rope(filled, 1_000_000.0)}
    keys |= layer_types(filled, lambda _: filled.get("sliding_window") is not None)
    moe = _softmax(
        config,
        experts=given(config, "num_local_experts", given(config, "num_experts", 8)),
        top_k=2,
        width=keys["ffn_hidden_dim"],
        renormalise=True,
        coefficient=0.001,
    )
    return {"model": keys, "moe": {**moe, "jitter": float(given(config, "router_jitter_noise", 0.0))}}


def _sparse_layers(config: HF) -> dict[str, Any]:
    """`moe.layers` by `decoder_sparse_step` and `mlp_only_layers`; nothing where all layers have experts."""
    step, dense = given(config, "decoder_sparse_step", 1), given(config, "mlp_only_layers", [])
    count = config["num_hidden_layers"]
    layers = [i for i in range(count) if i not in dense and (i + 1) % step == 0]
    return {} if len(layers) == count else {"layers": layers}


def _windows(config: HF) -> dict[str, Any]:
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return {}
    first = given(config, "max_window_layers", 0)
    return layer_types(config, lambda i: bool(i >= first))


def read_qwen2(config: HF) -> Tables:
    filled = {"num_key_value_heads": 16, "max_window_layers": 28, **config}
    bias = bool(given(config, "qkv_bias", True))
    keys = {**common_keys(filled), **read_rope(filled), "attention_bias": bias, "output_bias": False}
    moe = _softmax(
        config,
        experts=given(config, "num_experts", 60),
        top_k=4,
        width=given(config, "moe_intermediate_size", 1408),
        renormalise=bool(given(config, "norm_topk_prob", False)),
        coefficient=0.001,
    )
    shared = {
        "shared_experts": 1,
        "shared_gate": True,
        "shared_hidden_dim": given(config, "shared_expert_intermediate_size", 5632),
    }
    return {"model": {**keys, **_windows(filled)}, "moe": {**moe, **shared, **_sparse_layers(config)}}


def read_qwen3(config: HF) -> Tables:
    filled = {**config, "num_key_value_heads": given(config, "num_key_value_heads", 4)}
    bias = bool(config.get("attention_bias", False))
    keys = {
        **common_keys(filled),
        **read_rope(filled),
        "attention_bias": bias,
        "output_bias": bias,
        "qk_norm": True,
    }
    moe = _softmax(
        config,
        experts=given(config, "num_experts", given(config, "num_local_experts", 128)),
        top_k=8,
        width=given(config, "moe_intermediate_size", 768),
        renormalise=bool(given(config, "norm_topk_prob", False)),
        coefficient=0.001,
    )
    return {"model": {**keys, **_windows(filled)}, "moe": {**moe, **_sparse_layers(config)}}


def read_olmoe(config: HF) -> Tables:
    if config.get("clip_qkv") is not None:
        raise ForgeError("clip_qkv is not offered: queries, keys and values are not cut off here")
    bias = bool(config.get("attention_bias", False))
    keys = {**common_keys(config, eps=1e-5), **read_rope(config), "attention_bias": bias, "output_bias": bias}
    moe = _softmax(
        config,
        experts=given(config, "num_experts", given(config, "num_local_experts", 64)),
        top_k=8,
        width=keys["ffn_hidden_dim"],
        renormalise=bool(given(config, "norm_topk_prob", False)),
        coefficient=0.01,
    )
    return {"model": {**keys, "qk_norm": True, "qk_norm_over": "all_heads"}, "moe": moe}


def read_deepseek(config: HF) -> Tables:
    bias = bool(config.get("attention_bias", False))
    rope_dim, nope_dim = given(config, "qk_rope_head_dim", 64), given(config, "qk_nope_head_dim", 128)
    filled = {**config, "head_dim": rope_dim, "num_key_value_heads": config["num_attention_heads"]}
    keys = {
        **common_keys(filled),
        **read_rope(filled),
        "attention_scale": _deepseek_scale(config, nope_dim + rope_dim),
        "attention_bias": bias,
        "output_bias": bias,
    }
    width = given(config, "moe_intermediate_size", 2048)
    shared = given(config, "n_shared_experts", 1)
    moe = {
        "num_experts": given(config, "n_routed_experts", given(config, "num_local_experts", 256)),
        "top_k": given(config, "num_experts_per_tok", 8),
        "router": "sigmoid",
        "expert_hidden_dim": width,
        "shared_experts": shared,
        "first_dense": min(given(config, "first_k_dense_replace", 3), config["num_hidden_layers"]),
        "aux_loss_weight": 1e-4,
        "bias_rate": 0.001,
        "sigmoid": {
            "renormalise": bool(given(config, "norm_topk_prob", True)),
            "scaling": float(given(config, "routed_scaling_factor", 2.5)),
            "n_groups": given(config, "n_group", 8),
            "top_groups": given(config, "topk_group", 4),
        },
        "mla": {
            "kv_rank": given(config, "kv_lora_rank", 512),
            "q_rank": (config["q_lora_rank"] or 0) if "q_lora_rank" in config else 1536,
            "nope_dim": nope_dim,
            "v_dim": given(config, "v_head_dim", 128),
            "interleaved": bool(given(config, "rope_interleave", True)),
        },
    }
    return {"model": keys, "moe": moe}


def _deepseek_scale(config: HF, width: int) -> float:
    """1 / sqrt(width), times the square of yarn's factor for all dimensions where it is given."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scale: float = width**-0.5
    share = rope.get("mscale_all_dim")
    if share and rope.get("rope_type", rope.get("type", "default")) != "default" and rope["factor"] > 1:
        scale *= float(0.1 * share * math.log(rope["factor"]) + 1.0) ** 2
    return scale
