"""Qwen2-VL (Wang et al. 2024) and Qwen2.5-VL (Bai et al. 2025): images in sizes of their own, positions on
three axes, and Qwen 2 as decoder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from forge_core.config import Config
from forge_core.config.fields import evolve
from forge_core.config.tables import ModelConfig
from forge_core.contract import Architecture, TensorRule, UnsuitedError
from forge_core.contract.architecture import permute, rename
from forge_core.errors import ForgeError
from forge_core.model.architectures import ARCHITECTURES as DENSE
from forge_vlm.architectures.faithful import faithful
from forge_vlm.architectures.pictures import FILES, common_preparation, processor_files
from forge_vlm.architectures.sizes import image_token_id, image_tokens, modest, with_room
from forge_vlm.architectures.text import text_rules
from forge_vlm.encoders.keys import image_processor, read_picture_keys
from forge_vlm.options_packed import MergerOptions, PatchesOptions
from forge_vlm.table import VlmConfig

HF = Mapping[str, Any]
IMAGE = "<|image_pad|>"
TEXT = (("model.", "lm_head"), ("model.language_model.", "lm_head"))
VISUAL = ("visual.", "model.visual.")
"""As files have them, and as transformers holds them in memory."""

_TEXT = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "sliding_window": 4096,
}
_SECTIONS = [16, 24, 24]
_THETA = 1_000_000.0
_IMAGE_TOKEN = 151655
_VISION = {"depth": 32, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN2 = {"embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "hidden_act": "quick_gelu"}
_QWEN2_5 = {
    "hidden_size": 3584,
    "out_hidden_size": 3584,
    "intermediate_size": 3420,
    "hidden_act": "silu",
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


def read_text(config: HF) -> dict[str, Any]:
    """Keys of `[model]`; files of the first releases have those of the decoder beside those of the whole."""
    text = {**_TEXT, **(config.get("text_config") or config)}
    rope = dict(text.pop("rope_parameters", None) or text.pop("rope_scaling", None) or {})
    text.pop("rope_scaling", None)
    sections = rope.pop("mrope_section", _SECTIONS)
    kind = rope.pop("type", None)
    kind = rope.get("rope_type", kind)
    rope["rope_type"] = "default" if kind in (None, "mrope") else kind
    rope.setdefault("rope_theta", text.get("rope_theta", _THETA))
    text["rope_parameters"] = rope
    tied = bool(config.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False))
    found: dict[str, Any] = DENSE["qwen2"].read({**text, "tie_word_embeddings": tied})["model"]
    return {**found, "rope_sections": list(sections)}


def read(config: HF, *, windowed: bool) -> dict[str, dict[str, Any]]:
    """Tables of a model.

    Args:
        windowed: it is a Qwen2.5-VL.

    Raises:
        ForgeError: what is not offered.
    """
    model = read_text(config)
    vision = {**_VISION, **(_QWEN2_5 if windowed else _QWEN2), **(config.get("vision_config") or {})}
    encoder, out = _read_windowed(vision) if windowed else _read_plain(vision)
    if out != model["dim"]:
        raise ForgeError(f"the encoder gives tokens of width {out}, and the decoder takes {model['dim']}")
    if vision.get("in_channels", 3) != 3:
        raise ForgeError(f"the encoder takes {vision['in_channels']} channels, not 3")
    side = vision["spatial_merge_size"]
    encoder |= {
        "patch_size": _one(vision["patch_size"]),
        "frames": _one(vision["temporal_patch_size"]),
        "n_layers": vision["depth"],
        "n_heads": vision["num_heads"],
        **_read_pixels(image_processor(config), _one(vision["patch_size"]), side),
    }
    vlm = {
        "fusion": "joint",
        "image_token_id": config.get("image_token_id", _IMAGE_TOKEN),
        "encoder": {"name": "patches", "patches": encoder},
        "connector": {
            "name": "patch_merger",
            "patch_merger": {"side": side, "norm": encoder["norm"]},
        },
    }
    most = PatchesOptions(**encoder).geometry().most
    return with_room(model, vlm, most // (encoder["patch_size"] * side) ** 2)


def _one(size: Any) -> int:
    """A size that may be given for both sides."""
    if isinstance(size, list | tuple):
        if len(set(size)) != 1:
            raise ForgeError(f"patches of {size} are not square")
        return int(size[0])
    return int(size)


def _activation(vision: HF) -> str:
    names = {"quick_gelu": "quick_gelu", "gelu": "gelu", "silu": "silu", "swish": "silu"}
    if vision["hidden_act"] not in names:
        raise ForgeError(f"the activation {vision['hidden_act']!r} of the encoder is not offered")
    return names[vision["hidden_act"]]


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
    }
    return options, vision["out_hidden_size"]


def _read_pixels(said: HF, patch: int, side: int) -> dict[str, Any]:
    """How pictures are prepared, where a file says it."""
    for name, value in (("patch_size", patch), ("merge_size", side)):
        if said.get(name, value) != value:
            raise ForgeError(f"pictures are prepared with {name} = {said[name]}, and the encoder has {value}")
    rest = {key: value for key, value in said.items() if key != "size"}
    found = read_picture_keys(rest, None)
    size = said.get("size") or {}
    limits = {
        "min_pixels": said.get("min_pixels") or size.get("shortest_edge"),
        "max_pixels": said.get("max_pixels") or size.get("longest_edge"),
    }
    return found | {name: value for name, value in limits.items() if value is not None}


def write(config: Config, *, windowed: bool) -> dict[str, Any]:
    """Keys and files.

    Raises:
        UnsuitedError: another encoder or connector, or positions on one axis.
    """
    vlm, model = config[VlmConfig], config[ModelConfig]
    encoder = config.options("vlm.encoder", vlm.encoder.name)
    merger = config.options("vlm.connector", vlm.connector.name)
    if not isinstance(encoder, PatchesOptions) or not isinstance(merger, MergerOptions):
        parts = f"vlm.encoder.name = {vlm.encoder.name} and vlm.connector.name = {vlm.connector.name}"
        raise UnsuitedError(f"it has patches and a patch_merger, not {parts}")
    if not model.rope_sections:
        raise UnsuitedError("it has positions on three axes, and model.rope_sections is not set")
    name = "qwen2_5_vl" if windowed else "qwen2_vl"
    vision = _write_windowed(encoder, merger.side, model) if windowed else _write_plain(encoder, model)
    return {
        "text_config": _write_text(config, f"{name}_text"),
        "vision_config": {
            "model_type": f"{name}_vision",
            "depth": encoder.n_layers,
            "num_heads": encoder.n_heads,
            "in_channels": 3,
            "in_chans": 3,
            "patch_size": encoder.patch_size,
            "spatial_patch_size": encoder.patch_size,
            "spatial_merge_size": merger.side,
            "temporal_patch_size": encoder.frames,
            "hidden_act": encoder.activation,
            **vision,
        },
        "image_token_id": image_token_id(config, text=IMAGE, within=True),
        "tie_word_embeddings": model.tie_embeddings,
        **processor_files(
            "Qwen2_5_VLProcessor" if windowed else "Qwen2VLProcessor", _prepared(encoder, merger)
        ),
    }


def _write_text(config: Config, name: str) -> dict[str, Any]:
    """The nested `text_config`: Qwen 2's, with the sections of its positions in both releases' keys."""
    model = config[ModelConfig]
    plain = config.replace(model=evolve(model, rope_sections=[]))
    keys = DENSE["qwen2"].write(plain)
    sections = list(model.rope_sections)
    full = {**keys["rope_parameters"], "mrope_section": sections}
    return {
        **keys,
        "model_type": name,
        "rope_parameters": full,
        "rope_scaling": {"type": "mrope", "mrope_section": sections},
    }


def _write_plain(encoder: PatchesOptions, model: ModelConfig) -> dict[str, Any]:
    ratio, rest = divmod(encoder.hidden_dim, encoder.dim)
    if rest:
        raise UnsuitedError(f"its hidden_dim is a multiple of dim, not {encoder.hidden_dim}")
    return {"embed_dim": encoder.dim, "hidden_size": model.dim, "mlp_ratio": ratio}


def _write_windowed(encoder: PatchesOptions, side: int, model: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": encoder.dim,
        "out_hidden_size": model.dim,
        "intermediate_size": encoder.hidden_dim,
        "window_size": encoder.window * encoder.patch_size,
        "fullatt_block_indexes": list(encoder.full_layers),
        "tokens_per_second": 2,
    }


def _prepared(encoder: PatchesOptions, merger: MergerOptions) -> dict[str, Any]:
    return {
        **common_preparation(encoder),
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": encoder.patch_size,
        "merge_size": merger.side,
        "temporal_patch_size": encoder.frames,
        "min_pixels": encoder.min_pixels,
        "max_pixels": encoder.max_pixels,
        "size": {"shortest_edge": encoder.min_pixels, "longest_edge": encoder.max_pixels},
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


def rules(config: Config, *, windowed: bool) -> list[TensorRule]:
    """Names; the first layout of the two is the one that is written."""
    encoder: PatchesOptions = config.options("vlm.encoder", "patches")  # type: ignore[assignment]
    p, t, dim = encoder.patch_size, encoder.frames, encoder.dim
    found = text_rules(config, TEXT)
    skipped = ("mlp.fc1", "mlp.fc2") if windowed else ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    pairs = {
        f"blocks.{{layer}}.{a}": f"encoder.blocks.{{layer}}.{b}"
        for a, b in _BLOCK.items()
        if a not in skipped
    }
    pairs |= {f"merger.{a}": f"connector.{b}" for a, b in _MERGER.items()}
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


def _architecture(name: str, class_name: str, windowed: bool) -> Architecture:
    reading = partial(read, windowed=windowed)
    return Architecture(
        class_name=class_name,
        read=reading,
        write=faithful(name, partial(write, windowed=windowed), reading),
        rules=partial(rules, windowed=windowed),
        beside=FILES,
        tokens=image_tokens(IMAGE, "image_token_id"),
        for_training=modest,
    )


QWEN_VL = {
    "qwen2_vl": _architecture("qwen2_vl", "Qwen2VLForConditionalGeneration", False),
    "qwen2_5_vl": _architecture("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", True),
}
