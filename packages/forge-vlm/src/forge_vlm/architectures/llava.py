"""LLaVA 1.5 (Liu et al. 2023): a tower of CLIP or SigLIP, two matrices, and a dense decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_core.config import Config
from forge_core.config.tables import ModelConfig
from forge_core.contract import Architecture, TensorRule, UnsuitedError
from forge_core.contract.architecture import rename
from forge_core.errors import ForgeError
from forge_vlm.architectures.around import plain_template
from forge_vlm.architectures.faithful import faithful
from forge_vlm.architectures.pictures import FILES, processor_files, read_pictures, square_preparation
from forge_vlm.architectures.sizes import image_token_id, image_tokens, with_room
from forge_vlm.architectures.text import read_text, text_rules, write_text
from forge_vlm.architectures.towers import (
    read_tower,
    tower_options,
    tower_rules,
    unused_tensors,
    write_tower,
)
from forge_vlm.encoders.keys import OURS, THEIRS
from forge_vlm.options import MlpOptions
from forge_vlm.table import VlmConfig

HF = Mapping[str, Any]
IMAGE = "<image>"
Tables = dict[str, dict[str, Any]]

TEXT = (("language_model.model.", "language_model.lm_head"), ("model.language_model.", "lm_head"))
"""Where the text model is in files as they are on the Hub and as release 5 holds it in memory."""
TOWER = (
    "vision_tower.vision_model.",
    "model.vision_tower.",
    "model.vision_tower.vision_model.",
    "vision_tower.",
)
PROJECTOR = ("multi_modal_projector.", "model.multi_modal_projector.")

KINDS = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}
_LAYER = -2
_CLASS_TOKENS = {"clip": 1, "siglip": 0}
_TOWER_DEFAULTS = {"model_type": "clip_vision_model"}


def read(config: HF) -> Tables:
    """Tables of a LLaVA.

    Raises:
        ForgeError: a choice of visual features that is not offered.
    """
    text = config.get("text_config") or {}
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings", False))
    model = read_text(config, tied=tied)
    layer = config.get("vision_feature_layer", _LAYER)
    one = layer if isinstance(layer, int) else None
    name, tower = read_tower(config.get("vision_config") or _TOWER_DEFAULTS, "clip_vision_model", one)
    if one is None:
        tower["layers"] = list(layer)
    if name not in KINDS:
        raise ForgeError(f"a LLaVA with the tower {name} is not offered", f"{' and '.join(KINDS)} are")
    kept = config.get("vision_feature_select_strategy", "default") == "full"
    # all tokens, or all but the first, whatever that is
    tower |= {"class_token": kept} if _CLASS_TOKENS[name] else {"drop_first": not kept}
    tower |= read_pictures(config, tower.get("image_size"))
    activation = config.get("projector_hidden_act", "gelu")
    if activation not in OURS:
        raise ForgeError(f"the activation {activation!r} of the projector is not offered")
    vlm = {
        "fusion": "joint",
        "image_token_id": config.get("image_token_index", config.get("image_token_id", 32000)),
        "encoder": {"name": name, name: tower},
        "connector": {
            "name": "mlp",
            "mlp": {
                "hidden_dim": model["dim"],
                "activation": OURS[activation],
                "bias": bool(config.get("multimodal_projector_bias", True)),
            },
        },
    }
    size, patch = tower.get("image_size", 224), tower.get("patch_size", 32 if name == "clip" else 16)
    return with_room(model, vlm, (size // patch) ** 2 + _CLASS_TOKENS[name] - (not kept))


def write(config: Config) -> dict[str, Any]:
    """Keys and files of a LLaVA.

    Raises:
        UnsuitedError: another encoder or connector.
    """
    vlm, model = config[VlmConfig], config[ModelConfig]
    vision, text = write_tower(config, KINDS), write_text(config)
    connector = config.options("vlm.connector", vlm.connector.name)
    if not isinstance(connector, MlpOptions):
        raise UnsuitedError(f"llava has two matrices, not vlm.connector.name = {vlm.connector.name}")
    options, name = tower_options(config), vlm.encoder.name
    if options.layer is None and not options.layers:
        way = f"train with vlm.encoder.{name}.layer = -2, say"
        raise UnsuitedError(f"llava takes states without the last norm; vlm.encoder names no layer ({way})")
    extra = _CLASS_TOKENS[name]
    all_of_them = options.class_token if extra else not options.drop_first
    strategy = "full" if all_of_them else "default"
    tokens = (options.image_size // options.patch_size) ** 2 + extra - (not all_of_them)
    files = processor_files(
        "LlavaProcessor",
        square_preparation(options),
        patch_size=options.patch_size,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=extra,
        image_token=IMAGE,
    )
    files |= plain_template(config, IMAGE)
    if name == "siglip":
        vision["vision_use_head"] = False
    return {
        "text_config": text,
        "vision_config": vision,
        "image_token_index": image_token_id(config, text=IMAGE, within=True),
        "image_seq_length": tokens,
        "projector_hidden_act": THEIRS[connector.activation],
        "multimodal_projector_bias": connector.bias,
        "vision_feature_layer": list(options.layers) or options.layer,
        "vision_feature_select_strategy": strategy,
        "tie_word_embeddings": model.tie_embeddings,
        **files,
    }


def rules(config: Config) -> list[TensorRule]:
    """Names of all layouts, see `rules_with`."""
    return rules_with(config, {"linear_1": "up_proj", "linear_2": "down_proj"})


def rules_with(config: Config, connector: Mapping[str, str]) -> list[TensorRule]:
    """Names of all layouts of a tower, a projector and a text model; files are written as on the Hub.

    Args:
        connector: names of the projector's matrices there, and ours.
    """
    renamed = [
        rename(f"{prefix}{theirs}.{part}", f"connector.{ours}.{part}")
        for prefix in PROJECTOR
        for theirs, ours in connector.items()
        for part in ("weight", "bias")
    ]
    return [*text_rules(config, TEXT), *tower_rules(TOWER), *renamed]


LLAVA = {
    "llava": Architecture(
        class_name="LlavaForConditionalGeneration",
        read=read,
        write=faithful("llava", write, read),
        rules=rules,
        ignored=unused_tensors(TOWER),
        beside=FILES,
        tokens=image_tokens(IMAGE, "image_token_index"),
    )
}
