"""Rotary positions in config.json.

Release 5 of transformers writes `rope_parameters`, by kind of layer for models that have two; release 4 wrote
`rope_theta` and `rope_scaling`. Both are read, and both are written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from forge_core.config.tables import ModelConfig, RopeScalingConfig
from forge_core.errors import ForgeError

FULL, SLIDING = "full_attention", "sliding_attention"
NAMES = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "original_max_position_embeddings": "original_max_seq_len",
}
USED = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "original_max_position_embeddings",
    ),
}


def read_rope(config: Mapping[str, Any], default_theta: float = 10_000.0) -> dict[str, Any]:
    """Keys of `[model]` from a config.json: `rope_theta`, `rope_scaling`, `rope_theta_sliding`.

    Args:
        config: theirs.
        default_theta: of the family, where nothing says it.

    Raises:
        ForgeError: a rule that stretches positions in a way that is not offered.
    """
    parameters: Mapping[str, Any] = config.get("rope_parameters") or {}
    old_theta = config.get("rope_theta", default_theta)
    if FULL in parameters or SLIDING in parameters:
        full, sliding = parameters.get(FULL) or {}, parameters.get(SLIDING) or {}
    else:
        full = parameters or {**(config.get("rope_scaling") or {})}
        sliding = {}
    theta = float(full.get("rope_theta", old_theta))
    scaling = _read_scaling(full, config)
    keys: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    if sliding and _read_scaling(sliding, config)["type"] != "none":
        raise ForgeError("rotary positions are stretched in sliding layers, which is not offered")
    near = sliding.get("rope_theta", config.get("rope_local_base_freq"))
    if near is not None:
        keys["rope_theta_sliding"] = float(near)
    return keys


def _read_scaling(given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("rope_type", given.get("type", "default"))
    kind = "none" if kind == "default" else kind
    if kind not in USED:
        raise ForgeError(f"rotary positions of type {kind!r} are not offered", f"one of {', '.join(USED)} is")
    share = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        raise ForgeError(f"partial_rotary_factor = {share}: rotating a part of a head is not offered")
    found: dict[str, Any] = {"type": kind}
    length = config.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    values = {"original_max_position_embeddings": length, **given}
    if kind == "yarn":
        values = _completed_yarn(values, config)
    for theirs in USED[kind]:
        if values.get(theirs) is not None:
            value = values[theirs]
            ours = NAMES[theirs]
            whole = ours in ("original_max_seq_len", "truncate")
            found[ours] = value if whole else float(value)
    return found


def _completed_yarn(values: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """With the factor from the two lengths, and the one on cos and sin from `mscale` (DeepSeek-V2)."""
    found = dict(values)
    if found.get("factor") is None:
        found["factor"] = config["max_position_embeddings"] / found["original_max_position_embeddings"]
    scales = found.get("mscale"), found.get("mscale_all_dim")
    if found.get("attention_factor") is None and all(scales):
        one, other = (0.1 * scale * math.log(found["factor"]) + 1.0 for scale in scales if scale)
        found["attention_factor"] = one / other if found["factor"] > 1 else 1.0
    return found


def write_rope(model: ModelConfig, *, by_layer: bool = False) -> dict[str, Any]:
    """Keys of a config.json for both releases.

    Args:
        model: the resolved table.
        by_layer: the family has its parameters by kind of layer.
    """
    scaling = _write_scaling(model.rope_scaling)
    full = {"rope_type": "default", **scaling, "rope_theta": model.rope_theta}
    keys: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": scaling or None}
    if not by_layer:
        return {**keys, "rope_parameters": full}
    near = model.rope_theta if model.rope_theta_sliding is None else model.rope_theta_sliding
    sliding = {"rope_type": "default", "rope_theta": near}
    return {**keys, "rope_local_base_freq": near, "rope_parameters": {FULL: full, SLIDING: sliding}}


def _write_scaling(scaling: RopeScalingConfig) -> dict[str, Any]:
    if scaling.type == "none":
        return {}
    values = {theirs: getattr(scaling, NAMES[theirs]) for theirs in USED[scaling.type]}
    return {"rope_type": scaling.type, **{name: value for name, value in values.items() if value is not None}}
