"""Llama 3.2 Vision (Grattafiori et al. 2024): images in tiles, and a Llama of which some blocks ask them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_core.config import Config
from forge_core.config.tables import ModelConfig
from forge_core.contract import Architecture, TensorRule, UnsuitedError
from forge_core.contract.architecture import rename
from forge_core.errors import ForgeError
from forge_core.model.architectures import ARCHITECTURES as DENSE
from forge_core.model.architectures.rules import LAYER
from forge_vlm.architectures.around import plain_template, starting
from forge_vlm.architectures.faithful import faithful
from forge_vlm.architectures.pictures import FILES, common_preparation, processor_files
from forge_vlm.architectures.sizes import image_token_id, image_tokens, with_room
from forge_vlm.architectures.text import DECODER, text_rules
from forge_vlm.encoders.keys import image_processor, read_picture_keys
from forge_vlm.marks import BEGIN
from forge_vlm.options import LinearOptions
from forge_vlm.options_tiled import GatedCrossOptions, TilesOptions
from forge_vlm.table import VlmConfig

HF = Mapping[str, Any]
IMAGE = "<|image|>"
LAYOUTS = (
    ("language_model.model.", "language_model.lm_head", "vision_model.", "multi_modal_projector."),
    (
        "model.language_model.",
        "lm_head",
        "model.vision_model.",
        "model.multi_modal_projector.",
    ),
)
"""What comes before the names of text model, tower and projection, and the name of the head: as files have
them, and as transformers holds them in memory."""

_FIXED = ("attention_bias", "mlp_bias", "head_dim")
"""What a Llama may say and the text model here does not ask: no biases, heads as wide as they divide it."""
EXTRA = 8
"""Rows of the embedding behind the vocabulary."""
_IMAGE_TOKEN = 128256
_THETA = 500_000.0
_TEXT = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
}
_VISION = {
    "hidden_size": 1280,
    "hidden_act": "gelu",
    "num_hidden_layers": 32,
    "num_global_layers": 8,
    "attention_heads": 16,
    "intermediate_size": 5120,
    "vision_output_dim": 7680,
    "image_size": 448,
    "patch_size": 14,
    "norm_eps": 1e-5,
    "max_num_tiles": 4,
    "intermediate_layers_indices": [3, 7, 15, 23, 30],
}
_SIZES = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "max_tiles": "max_num_tiles",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_global_layers": "num_global_layers",
    "n_heads": "attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
    "norm_eps": "norm_eps",
}
"""Keys of our options and what a `vision_config` calls them."""


def read(config: HF) -> dict[str, dict[str, Any]]:
    """Tables of a model.

    Raises:
        ForgeError: what is not offered.
    """
    said = _said(config, "text_config")
    text = {**_TEXT, **{key: value for key, value in said.items() if key not in _FIXED}}
    if text.get("rope_parameters") is None:
        text.setdefault("rope_theta", _THETA)
    else:
        text["rope_parameters"] = {"rope_theta": _THETA, **text["rope_parameters"]}
    model = DENSE["llama"].read({**text, "tie_word_embeddings": text.get("tie_word_embeddings", False)})[
        "model"
    ]
    layers = [i for i in text["cross_attention_layers"] if i < model["n_layers"]]
    vlm = {
        "fusion": "gated_cross_attention",
        "image_token_id": config.get("image_token_index", config.get("image_token_id", _IMAGE_TOKEN)),
        "gated_cross_attention": {"layers": layers, "extra_tokens": EXTRA},
        "encoder": {"name": "tiles", "tiles": _read_encoder(config)},
        "connector": {"name": "linear"},
    }
    return with_room(model, vlm, 0)


def _said(config: HF, name: str) -> dict[str, Any]:
    return {key: value for key, value in (config.get(name) or {}).items() if value is not None}


def _read_encoder(config: HF) -> dict[str, Any]:
    vision = {**_VISION, **_said(config, "vision_config")}
    options = {ours: vision[theirs] for ours, theirs in _SIZES.items()}
    for name in ("image_size", "patch_size"):
        if not isinstance(options[name], int):
            raise ForgeError(f"{name} of the vision tower is {options[name]}, which is not square")
    if options["activation"] not in ("gelu", "quick_gelu", "silu"):
        raise ForgeError(f"the activation {options['activation']!r} of the vision tower is not offered")
    options["taken"] = list(vision["intermediate_layers_indices"])
    tower = TilesOptions(**options)
    if vision["vision_output_dim"] != tower.out_dim:
        given = vision["vision_output_dim"]
        raise ForgeError(
            f"the vision tower gives {tower.out_dim} numbers a token, not vision_output_dim = {given}"
        )
    supported = vision.get("supported_aspect_ratios")
    arrangements = tower.geometry().arrangements
    if supported is not None and [tuple(pair) for pair in supported] != arrangements:
        raise ForgeError(
            f"arrangements of tiles are {arrangements}, not supported_aspect_ratios = {supported}"
        )
    return options | _read_pixels(image_processor(config), tower)


def _read_pixels(said: HF, tower: TilesOptions) -> dict[str, Any]:
    if said.get("max_image_tiles", tower.max_tiles) != tower.max_tiles:
        raise ForgeError(
            f"pictures have {said['max_image_tiles']} tiles, and the tower takes {tower.max_tiles}"
        )
    sides = {value for value in (said.get("size") or {}).values() if isinstance(value, int)}
    if sides - {tower.image_size}:
        raise ForgeError(f"tiles are of {sorted(sides)} pixels, and the tower takes {tower.image_size}")
    return read_picture_keys({k: v for k, v in said.items() if k not in ("size", "do_pad")}, None)


def write(config: Config) -> dict[str, Any]:
    """Keys and files.

    Raises:
        UnsuitedError: another encoder, connector or fusion.
    """
    vlm, model = config[VlmConfig], config[ModelConfig]
    encoder = config.options("vlm.encoder", vlm.encoder.name)
    connector = config.options("vlm.connector", vlm.connector.name)
    fusion = config.options("vlm", vlm.fusion)
    if not isinstance(encoder, TilesOptions) or not isinstance(connector, LinearOptions):
        parts = f"vlm.encoder.name = {vlm.encoder.name} and vlm.connector.name = {vlm.connector.name}"
        raise UnsuitedError(f"it has tiles and one matrix, not {parts}")
    if not isinstance(fusion, GatedCrossOptions):
        raise UnsuitedError(f"it has gated_cross_attention, not vlm.fusion = {vlm.fusion}")
    text = {**DENSE["llama"].write(config), "cross_attention_layers": list(fusion.layers)}
    if model.tie_embeddings:
        raise UnsuitedError("its head is not its embedding, and model.tie_embeddings is set")
    prepared = {
        **common_preparation(encoder),
        "image_processor_type": "MllamaImageProcessor",
        "size": {"height": encoder.image_size, "width": encoder.image_size},
        "max_image_tiles": encoder.max_tiles,
        "do_pad": True,
    }
    return {
        "text_config": {**text, "model_type": "mllama_text_model", "pad_token_id": None},
        "vision_config": {
            "model_type": "mllama_vision_model",
            "num_channels": 3,
            "vision_output_dim": encoder.out_dim,
            "intermediate_layers_indices": list(encoder.taken),
            "supported_aspect_ratios": [list(pair) for pair in encoder.geometry().arrangements],
            **{theirs: getattr(encoder, ours) for ours, theirs in _SIZES.items()},
        },
        "image_token_index": image_token_id(config, text=IMAGE, within=False),
        **processor_files("MllamaProcessor", prepared),
        **plain_template(config, IMAGE, around=vlm.after_image != BEGIN),
    }


_BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    **{f"self_attn.{x}_proj": f"{x}_proj" for x in "qkvo"},
    "mlp.fc1": "up_proj",
    "mlp.fc2": "down_proj",
}
_TOWER = {
    "patch_embedding.weight": "patches.weight",
    "class_embedding": "class_token",
    "gated_positional_embedding.embedding": "positions",
    "gated_positional_embedding.gate": "position_gate",
    "gated_positional_embedding.tile_embedding.weight": "tile_positions.weight",
    "pre_tile_positional_embedding.embedding.weight": "before.embedding.weight",
    "pre_tile_positional_embedding.gate": "before.gate",
    "post_tile_positional_embedding.embedding.weight": "behind.embedding.weight",
    "post_tile_positional_embedding.gate": "behind.gate",
    "global_transformer.layers.{layer}.gate_attn": "global_blocks.{layer}.attn_gate",
    "global_transformer.layers.{layer}.gate_ffn": "global_blocks.{layer}.mlp_gate",
}
_CROSS = {
    **{f"cross_attn.{x}_proj.weight": f"cross.{x}_proj.weight" for x in "qkvo"},
    **{f"cross_attn.{x}_norm.weight": f"cross.{x}_norm.weight" for x in "qk"},
    "cross_attn_attn_gate": "attn_gate",
    "cross_attn_mlp_gate": "mlp_gate",
}


def rules(config: Config) -> list[TensorRule]:
    """Names; the first layout of the two is the one that is written."""
    tower = dict(_TOWER)
    for part in ("weight", "bias"):
        tower |= {
            f"layernorm_{a}.{part}": f"{b}.{part}" for a, b in (("pre", "first_norm"), ("post", "last_norm"))
        }
        for theirs, ours in (("transformer", "blocks"), ("global_transformer", "global_blocks")):
            tower |= {
                f"{theirs}.layers.{{layer}}.{a}.{part}": f"{ours}.{{layer}}.{b}.{part}"
                for a, b in _BLOCK.items()
            }
    found = text_rules(config, [(text, head) for text, head, _, _ in LAYOUTS])
    for text, _, vision, projection in LAYOUTS:
        found += [rename(f"{text}{LAYER}{a}", f"{DECODER}{LAYER}{b}") for a, b in _CROSS.items()]
        found += [rename(f"{vision}{a}", f"encoder.{b}") for a, b in tower.items()]
        found += [rename(f"{projection}{part}", f"connector.proj.{part}") for part in ("weight", "bias")]
    return found


MLLAMA = {
    "mllama": Architecture(
        class_name="MllamaForConditionalGeneration",
        read=read,
        write=faithful("mllama", write, read),
        rules=rules,
        beside=FILES,
        tokens=image_tokens(IMAGE, "image_token_index"),
        marks=starting(BEGIN),
    )
}
