"""Our tables as config.json of families with experts, and whether that was everything."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

from forge_core.config.config import Config
from forge_core.config.tables import ModelConfig, RopeScalingConfig
from forge_core.contract import UnsuitedError
from forge_core.model.architectures import common_config, differences, write_rope
from forge_moe.architectures.reading import HF, Tables
from forge_moe.table import MlaConfig, MoeConfig, SigmoidOptions, SoftmaxOptions, expert_layers

Options = SoftmaxOptions | SigmoidOptions


def _write_common(model: ModelConfig, moe: MoeConfig) -> dict[str, Any]:
    return {
        **common_config(model),
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.aux_loss_weight / moe.top_k,
        "output_router_logits": False,
        **write_rope(model),
    }


def write_mixtral(model: ModelConfig, moe: MoeConfig, options: Options) -> dict[str, Any]:
    return {
        **_write_common(model, moe),
        "intermediate_size": moe.expert_hidden_dim,
        "num_local_experts": moe.num_experts,
        "router_jitter_noise": moe.jitter,
        "sliding_window": model.sliding_window,
    }


def _write_qwen(model: ModelConfig, moe: MoeConfig, options: Options) -> dict[str, Any]:
    sparse = expert_layers(moe, model.n_layers)
    return {
        **_write_common(model, moe),
        "num_experts": moe.num_experts,
        "moe_intermediate_size": moe.expert_hidden_dim,
        "norm_topk_prob": options.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(model.n_layers) if i not in sparse],
        "use_sliding_window": model.sliding_window is not None,
        "sliding_window": model.sliding_window,
        "max_window_layers": 0,
    }


def write_qwen2(model: ModelConfig, moe: MoeConfig, options: Options) -> dict[str, Any]:
    return {
        **_write_qwen(model, moe, options),
        "qkv_bias": model.attention_bias,
        "shared_expert_intermediate_size": moe.shared_hidden_dim or 0,
    }


def write_qwen3(model: ModelConfig, moe: MoeConfig, options: Options) -> dict[str, Any]:
    keys = _write_qwen(model, moe, options)
    return {**keys, "num_local_experts": moe.num_experts, "attention_bias": model.attention_bias}


def write_olmoe(model: ModelConfig, moe: MoeConfig, options: Options) -> dict[str, Any]:
    return {
        **_write_common(model, moe),
        "intermediate_size": moe.expert_hidden_dim,
        "num_experts": moe.num_experts,
        "norm_topk_prob": options.renormalise,
        "attention_bias": model.attention_bias,
        "clip_qkv": None,
    }


def write_deepseek(model: ModelConfig, moe: MoeConfig, options: Options) -> dict[str, Any]:
    if not isinstance(options, SigmoidOptions) or not moe.shared_experts or not moe.mla.kv_rank:
        raise UnsuitedError("deepseek_v3 has a sigmoid router, shared experts and latent attention")
    width = moe.expert_hidden_dim or 1
    keys = {
        **_write_common(model, moe),
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": (moe.shared_hidden_dim or 0) // width,
        "moe_intermediate_size": width,
        "first_k_dense_replace": (expert_layers(moe, model.n_layers) or [model.n_layers])[0],
        "norm_topk_prob": options.renormalise,
        "routed_scaling_factor": options.scaling,
        "n_group": options.n_groups,
        "topk_group": options.top_groups,
        "kv_lora_rank": moe.mla.kv_rank,
        "q_lora_rank": moe.mla.q_rank or None,
        "qk_nope_head_dim": moe.mla.nope_dim,
        "qk_rope_head_dim": model.head_dim,
        "v_head_dim": moe.mla.v_dim,
        "rope_interleave": moe.mla.interleaved,
        "attention_bias": model.attention_bias,
    }
    return _with_mscale(keys, model)


def _with_mscale(keys: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Yarn's factors as DeepSeek writes them, from the scale of the scores and the factor on cos and sin."""
    scaling = model.rope_scaling
    if scaling.type != "yarn" or model.attention_scale is None or scaling.factor <= 1:
        return keys
    width = keys["qk_nope_head_dim"] + keys["qk_rope_head_dim"]
    all_dim = (math.sqrt(model.attention_scale * math.sqrt(width)) - 1.0) / (0.1 * math.log(scaling.factor))
    if abs(all_dim) < 1e-9:
        return keys
    parameters = {**keys["rope_parameters"], "mscale_all_dim": all_dim}
    return {
        **keys,
        "rope_parameters": parameters,
        "rope_scaling": {**keys["rope_scaling"], "mscale_all_dim": all_dim},
    }


def essence(moe: MoeConfig, options: Any, n_layers: int) -> dict[str, Any]:
    """What a resolved table says of the function that the model computes; equal for equal models."""
    return {
        "moe.num_experts": moe.num_experts,
        "moe.top_k": moe.top_k,
        "moe.router": moe.router,
        f"moe.{moe.router}": None if options is None else _values(options),
        "moe.expert_hidden_dim": moe.expert_hidden_dim,
        "moe.shared_hidden_dim": moe.shared_hidden_dim if moe.shared_experts else 0,
        "moe.shared_gate": moe.shared_gate,
        "moe.layers": expert_layers(moe, n_layers),
        "moe.capacity_factor": moe.capacity_factor,
        "moe.bias_rate": bool(moe.bias_rate),
        "moe.mla": _values(moe.mla) if moe.mla.kv_rank else None,
    }


def _values(table: Any) -> dict[str, Any]:
    found: dict[str, Any] = attrs.asdict(table)
    return found


Write = Callable[[ModelConfig, MoeConfig, Any], dict[str, Any]]


def faithful(name: str, write: Write, read: Callable[[HF], Tables]) -> Callable[[Config], dict[str, Any]]:
    """`Architecture.write`: what `write` puts down, if reading it back gives the same model."""

    def written(config: Config) -> dict[str, Any]:
        if "moe" not in config.plugins:
            raise UnsuitedError(f"{name} has experts, which the model has not")
        model, moe = config[ModelConfig], config[MoeConfig]
        options = config.options("moe", moe.router)
        if not isinstance(options, SoftmaxOptions | SigmoidOptions):
            raise UnsuitedError(f"{name} has no word for moe.router = {moe.router}")
        keys = write(model, moe, options)
        lost = _lost(read(keys), model, moe, options)
        if lost:
            raise UnsuitedError(f"{name} has no word for {', '.join(lost)}")
        return keys

    return written


def _lost(tables: Tables, model: ModelConfig, moe: MoeConfig, options: Options) -> list[str]:
    """Keys that would be others if what was written were read."""
    back, back_moe = tables["model"], tables["moe"]
    again = ModelConfig(**{**back, "rope_scaling": RopeScalingConfig(**back.get("rope_scaling", {}))})
    other = {name: value for name, value in back_moe.items() if name not in ("softmax", "sigmoid", "mla")}
    table = MoeConfig(**other, mla=MlaConfig(**back_moe.get("mla", {})))
    if table.shared_hidden_dim is None and table.shared_experts:
        width = table.expert_hidden_dim or 0
        table = attrs.evolve(table, shared_hidden_dim=table.shared_experts * width)  # type: ignore[misc]
    kind = SigmoidOptions if table.router == "sigmoid" else SoftmaxOptions
    theirs = essence(table, kind(**back_moe.get(table.router, {})), model.n_layers)
    ours = essence(moe, options, model.n_layers)
    dense = len(expert_layers(moe, model.n_layers)) < model.n_layers
    lost = [
        f"model.{key} = {getattr(model, key)}"
        for key in differences(model, again)
        if dense or key != "ffn_hidden_dim"
    ]
    return lost + [f"{key} = {value}" for key, value in ours.items() if theirs.get(key) != value]
