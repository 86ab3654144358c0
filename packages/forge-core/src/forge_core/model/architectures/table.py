"""What all dense families share between config.json and `[model]`, and whether two tables are one model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from forge_core.config.config import Config
from forge_core.config.tables import ModelConfig, RopeScalingConfig
from forge_core.contract.architecture import UnsuitedError
from forge_core.errors import ForgeError
from forge_core.model.architectures.rope import FULL, NAMES, SLIDING, USED
from forge_core.model.dimensions import slides

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
THEIR_ACTIVATIONS = {"silu": "silu", "relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}

_OF_TRAINING = ("init_std", "init_from", "dropout", "attention", "ffn_dim_multiplier", "max_seq_len")
"""Keys that do not change what the model computes."""


def common_keys(config: Mapping[str, Any], *, eps: float = 1e-6, tied: bool = False) -> dict[str, Any]:
    """Keys of `[model]` that every family reads alike.

    Args:
        config: theirs.
        eps, tied: what the family means where `rms_norm_eps` or `tie_word_embeddings` is left out.

    Raises:
        ForgeError: a key is missing, or an activation is not offered.
    """
    try:
        heads = config["num_attention_heads"]
        keys: dict[str, Any] = {
            "dim": config["hidden_size"],
            "n_layers": config["num_hidden_layers"],
            "n_heads": heads,
            "n_kv_heads": given(config, "num_key_value_heads", heads),
            "head_dim": given(config, "head_dim", config["hidden_size"] // heads),
            "vocab_size": config["vocab_size"],
            "ffn_hidden_dim": config["intermediate_size"],
            "max_seq_len": config["max_position_embeddings"],
        }
    except KeyError as error:
        raise ForgeError(f"config.json does not say {error.args[0]}") from None
    activation = given(config, "hidden_activation", given(config, "hidden_act", "silu"))
    if activation not in ACTIVATIONS:
        raise ForgeError(
            f"the activation {activation!r} is not offered", f"one of {', '.join(ACTIVATIONS)} is"
        )
    return {
        **keys,
        "activation": ACTIVATIONS[activation],
        "gated_mlp": True,
        "norm_eps": float(given(config, "rms_norm_eps", eps)),
        "tie_embeddings": bool(given(config, "tie_word_embeddings", tied)),
        "init_std": float(given(config, "initializer_range", 0.02)),
    }


def common_config(model: ModelConfig) -> dict[str, Any]:
    """Keys of config.json that every family writes alike; what `common_keys` reads."""
    return {
        "hidden_size": model.dim,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "intermediate_size": model.ffn_hidden_dim,
        "max_position_embeddings": model.max_seq_len,
        "hidden_act": THEIR_ACTIVATIONS[model.activation],
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "attention_dropout": 0.0,
        "use_cache": True,
    }


def given(config: Mapping[str, Any], name: str, default: Any) -> Any:
    """What config.json says of a key; null is nothing said."""
    value = config.get(name)
    return default if value is None else value


def layer_types(config: Mapping[str, Any], default: Callable[[int], bool]) -> dict[str, Any]:
    """`sliding_window` and `layer_types` from a config.json, in the shortest pattern that repeats.

    Args:
        config: theirs.
        default: whether layer i slides, where `layer_types` is left out.

    Raises:
        ForgeError: a kind of attention that is not offered, or sliding layers without a window.
    """
    n_layers, window = config["num_hidden_layers"], config.get("sliding_window")
    given = config.get("layer_types") or [SLIDING if default(i) else FULL for i in range(n_layers)]
    names = {FULL: "full", SLIDING: "sliding"}
    for name in given:
        if name not in names:
            raise ForgeError(f"layers of type {name!r} are not offered", f"{FULL} and {SLIDING} are")
    types = [names[name] for name in given][:n_layers]
    if "sliding" not in types:
        return {}
    if window is None:
        raise ForgeError("config.json has sliding layers and no sliding_window")
    for length in range(1, n_layers + 1):
        if all(types[i] == types[i % length] for i in range(n_layers)):
            types = types[:length]
            break
    return (
        {"sliding_window": window}
        if types == ["sliding"]
        else {"sliding_window": window, "layer_types": types}
    )


def essence(model: ModelConfig) -> dict[str, Any]:
    """What a resolved table says of the function that the model computes; equal for equal models."""
    found: dict[str, Any] = attrs.asdict(model)  # type: ignore[arg-type]  # a table is an attrs class
    for name in _OF_TRAINING:
        del found[name]
    if model.attention_scale is None and model.head_dim:
        found["attention_scale"] = model.head_dim**-0.5
    if not model.qk_norm:
        found["qk_norm_over"] = "head"
    kinds = ["sliding" if slides(model, i) else "full" for i in range(model.n_layers)]
    found["layer_types"] = kinds
    found["rope_scaling"] = _used_scaling(model.rope_scaling)
    near = {"rope_theta_sliding": model.rope_theta, "rope_scaling": found["rope_scaling"]}
    if model.rope_theta_sliding is not None:
        near = {
            "rope_theta_sliding": model.rope_theta_sliding,
            "rope_scaling": _used_scaling(RopeScalingConfig()),
        }
    if "sliding" not in kinds:
        near = {}
        found["sliding_window"] = None
    found["rope_theta_sliding"] = near
    if "full" not in kinds and near:
        found["rope_theta"], found["rope_scaling"] = near["rope_theta_sliding"], near["rope_scaling"]
    return found


def _used_scaling(scaling: RopeScalingConfig) -> dict[str, Any]:
    names = [NAMES[theirs] for theirs in USED[scaling.type]]
    return {"type": scaling.type, **{name: getattr(scaling, name) for name in names}}


def differences(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Keys of two resolved tables whose models compute different things."""
    first, second = essence(one), essence(other)
    return [name for name in first if not _same(first[name], second[name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-9)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


Read = Callable[[Mapping[str, Any]], dict[str, dict[str, Any]]]


def faithful(
    name: str, write: Callable[[ModelConfig], dict[str, Any]], read: Read
) -> Callable[[Config], dict[str, Any]]:
    """`Architecture.write` from one that puts down what the family has words for.

    Whether that was everything is found out by reading it back: where the model would be another one, the
    answer raises `UnsuitedError` with the keys at fault.
    """

    def written(config: Config) -> dict[str, Any]:
        model = config[ModelConfig]
        keys = write(model)
        back = read(keys)["model"]
        scaling = RopeScalingConfig(**back.pop("rope_scaling", {}))
        lost = differences(model, ModelConfig(**back, rope_scaling=scaling))
        if lost:
            said = ", ".join(f"model.{key} = {_shown(model, key)}" for key in lost)
            raise UnsuitedError(f"{name} has no word for {said}")
        return keys

    return written


def _shown(model: ModelConfig, key: str) -> Any:
    value = getattr(model, key)
    return value.type if isinstance(value, RopeScalingConfig) else value
