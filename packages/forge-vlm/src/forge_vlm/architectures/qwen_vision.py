"""The tower of Qwen2-VL and Qwen2.5-VL in the words of their `vision_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_core.config.tables import ModelConfig
from forge_core.contract import TensorRule, UnsuitedError
from forge_core.contract.architecture import permute, rename
from forge_core.errors import ForgeError
from forge_vlm.options_packed import MergerOptions, PatchesOptions

HF = Mapping[str, Any]
VISUAL = ("visual.", "model.visual.")
"""As files have them, and as transformers holds them in memory."""

_COMMON = {"depth": 32, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN2 = {"embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "hidden_act": "quick_gelu"}
_QWEN2_5 = {
    "hidden_size": 3584,
    "out_hidden_size": 3584,
    "intermediate_size": 3420,
    "hidden_act": "silu",
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 4,
}
_ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "silu": "silu", "swish": "silu"}


def read_vision(config: HF, width: int, *, windowed: bool) -> tuple[dict[str, Any], int]:
    """Options of the encoder, and how many patches along each side the merger joins.

    Args:
        config: of the whole model. width: of the decoder. windowed: it is a Qwen2.5-VL.

    Raises:
        ForgeError: what is not offered.
    """
    vision = {**_COMMON, **(_QWEN2_5 if windowed else _QWEN2), **(config.get("vision_config") or {})}
    encoder, out = _read_windowed(vision) if windowed else _read_plain(vision)
    if out != width:
        raise ForgeError(f"the encoder gives tokens of width {out}, and the decoder takes {width}")
    if vision.get("in_channels", 3) != 3:
        raise ForgeError(f"the encoder takes {vision['in_channels']} channels, not 3")
    encoder |= {
        "patch_size": _one(vision["patch_size"]),
        "frames": _one(vision["temporal_patch_size"]),
        "n_layers": vision["depth"],
        "n_heads": vision["num_heads"],
    }
    return encoder, vision["spatial_merge_size"]


def write_vision(
    encoder: PatchesOptions, merger: MergerOptions, model: ModelConfig, *, windowed: bool
) -> dict[str, Any]:
    """The `vision_config`.

    Raises:
        UnsuitedError: a tower of another kind.
    """
    own = _write_windowed(encoder, model) if windowed else _write_plain(encoder, model)
    return {
        "model_type": "qwen2_5_vl_vision" if windowed else "qwen2_vl_vision",
        "depth": encoder.n_layers,
        "num_heads": encoder.n_heads,
        "in_channels": 3,
        "in_chans": 3,
        "patch_size": encoder.patch_size,
        "spatial_patch_size": encoder.patch_size,
        "spatial_merge_size": merger.side,
        "temporal_patch_size": encoder.frames,
        "hidden_act": encoder.activation,
        **own,
    }


def _one(size: Any) -> int:
    """A size that may be given for both sides."""
    if isinstance(size, list | tuple):
        if len(set(size)) != 1:
            raise ForgeError(f"patches of {size} are not square")
        return int(size[0])
    return int(size)


def _activation(vision: HF) -> str:
    if vision["hidden_act"] not in _ACTIVATIONS:
        raise ForgeError(f"the activation {vision['hidden_act']!r} of the encoder is not offered")
    return _ACTIVATIONS[vision["hidden_act"]]


def _read_plain(vision: HF) -> tuple[dict[str, Any], int]:
    """Options that are Qwen2-VL's own, and the width of its tokens."""
    options = {
        "dim": vision["embed_dim"],
        "hidden_dim": int(vision["embed_dim"] * vision["mlp_ratio"]),
        "activation": _activation(vision),
        "norm": "layernorm",
    }
    return options, vision["hidden_size"]


def _read_windowed(vision: HF) -> tuple[dict[str, Any], int]:
    """Options that are Qwen2.5-VL's own, and the width of its tokens. Windows are of whole squares."""
    side = vision["spatial_merge_size"]
    options = {
        "dim": vision["hidden_size"],
        "hidden_dim": vision["intermediate_size"],
        "activation": _activation(vision),
        "gated_mlp": True,
        "norm": "rmsnorm",
        "window": vision["window_size"] // side // _one(vision["patch_size"]) * side,
        "full_layers": [i for i in vision["fullatt_block_indexes"] if i < vision["depth"]],
        "tokens_per_second": float(vision["tokens_per_second"]),
    }
    return options, vision["out_hidden_size"]


def _write_plain(encoder: PatchesOptions, model: ModelConfig) -> dict[str, Any]:
    ratio, rest = divmod(encoder.hidden_dim, encoder.dim)
    if rest:
        raise UnsuitedError(f"its hidden_dim is a multiple of dim, not {encoder.hidden_dim}")
    return {"embed_dim": encoder.dim, "hidden_size": model.dim, "mlp_ratio": ratio}


def _write_windowed(encoder: PatchesOptions, model: ModelConfig) -> dict[str, Any]:
    if not encoder.tokens_per_second:
        key = "vlm.encoder.patches.tokens_per_second"
        raise UnsuitedError(f"its positions along time count seconds, and {key} = 0", f"set {key} = 2")
    return {
        "hidden_size": encoder.dim,
        "out_hidden_size": model.dim,
        "intermediate_size": encoder.hidden_dim,
        "window_size": encoder.window * encoder.patch_size,
        "fullatt_block_indexes": list(encoder.full_layers),
        "tokens_per_second": int(encoder.tokens_per_second),
    }


_BLOCK = {
    "norm1": "attn_norm",
    "norm2": "mlp_norm",
    "attn.qkv": "qkv_proj",
    "attn.proj": "o_proj",
    "mlp.fc1": "up_proj",
    "mlp.fc2": "down_proj",
    "mlp.gate_proj": "gate_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "down_proj",
}
_MERGER = {"ln_q": "norm", "mlp.0": "up_proj", "mlp.2": "down_proj"}


def vision_rules(encoder: PatchesOptions, *, windowed: bool) -> list[TensorRule]:
    """Names; the first layout of the two is the one that is written."""
    p, t, dim = encoder.patch_size, encoder.frames, encoder.dim
    skipped = ("mlp.fc1", "mlp.fc2") if windowed else ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    pairs = {
        f"blocks.{{layer}}.{a}": f"encoder.blocks.{{layer}}.{b}"
        for a, b in _BLOCK.items()
        if a not in skipped
    }
    pairs |= {f"merger.{a}": f"connector.{b}" for a, b in _MERGER.items()}
    found: list[TensorRule] = []
    for prefix in VISUAL:
        width = 3 * t * p * p
        found.append(
            permute(
                f"{prefix}patch_embed.proj.weight",
                "encoder.patches.weight",
                (0, 1),
                shape=(dim, width),
                theirs_shape=(dim, 3, t, p, p),
                ours_shape=(dim, width),
            )
        )
        for a, b in pairs.items():
            found += [rename(f"{prefix}{a}.{part}", f"{b}.{part}") for part in ("weight", "bias")]
    return found
