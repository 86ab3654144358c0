"""PaliGemma 1 and 2 (Beyer et al. 2024; Steiner et al. 2024): SigLIP, one matrix, and Gemma, of which all
before the answer see each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_core.config import Config
from forge_core.config.tables import ModelConfig
from forge_core.contract import Architecture, TensorRule, UnsuitedError
from forge_core.errors import ForgeError
from forge_vlm.architectures.around import check_marks, plain_template, starting, takes_bytes
from forge_vlm.architectures.faithful import faithful
from forge_vlm.architectures.llava import TOWER, rules_with
from forge_vlm.architectures.pictures import FILES, processor_files, read_pictures, square_preparation
from forge_vlm.architectures.sizes import image_token_id, image_tokens, with_room
from forge_vlm.architectures.text import read_text, write_text
from forge_vlm.architectures.towers import (
    read_tower,
    tower_options,
    unused_tensors,
    write_tower,
)
from forge_vlm.marks import BOS
from forge_vlm.options import LinearOptions
from forge_vlm.table import VlmConfig

HF = Mapping[str, Any]
IMAGE = "<image>"
KINDS = {"siglip": "siglip_vision_model"}
_TOWER_DEFAULTS = {
    "intermediate_size": 4096,
    "hidden_size": 1152,
    "patch_size": 14,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
}


def read(config: HF) -> dict[str, dict[str, Any]]:
    """Tables of a PaliGemma. Positions count from 0 here and from 1 there, which rotary positions, that know
    distances alone, do not see.

    Raises:
        ForgeError: widths that do not meet.
    """
    # it says that the prefix is seen in both directions, which the fusion does
    text = {k: v for k, v in (config.get("text_config") or {}).items() if k != "use_bidirectional_attention"}
    tied = bool(config.get("tie_word_embeddings", True))
    model = read_text({**config, "text_config": text}, default="gemma", tied=tied)
    name, tower = read_tower(config.get("vision_config") or _TOWER_DEFAULTS, "siglip_vision_model")
    if name not in KINDS:
        raise ForgeError(f"a PaliGemma with the tower {name} is not offered")
    tower |= read_pictures(config, tower.get("image_size"))
    width = config.get("projection_dim", 2048)
    if width != model["dim"]:
        raise ForgeError(f"projection_dim = {width}, and the decoder's width is {model['dim']}")
    vlm = {
        "fusion": "joint",
        "joint": {"bidirectional": "prefix"},
        "after_image": BOS,
        "image_token_id": config.get("image_token_index", config.get("image_token_id", 256000)),
        "encoder": {"name": name, name: tower},
        "connector": {"name": "linear", "linear": {"bias": True}},
    }
    return with_room(model, vlm, (tower.get("image_size", 224) // tower.get("patch_size", 16)) ** 2)


def write(config: Config) -> dict[str, Any]:
    """Keys and files of a PaliGemma.

    Raises:
        UnsuitedError: another encoder, connector or decoder, or other text around pictures.
    """
    vlm, model = config[VlmConfig], config[ModelConfig]
    vision = {**write_tower(config, KINDS), "vision_use_head": False, "projection_dim": model.dim}
    if not isinstance(config.options("vlm.connector", vlm.connector.name), LinearOptions):
        raise UnsuitedError(f"paligemma has one matrix, not vlm.connector.name = {vlm.connector.name}")
    text = write_text(config, ("gemma", "gemma2"))
    options = tower_options(config)
    # of a tokenizer that this writes, no token may start a text
    after = "" if takes_bytes(config) and not vlm.after_image else BOS
    check_marks(config, {"before_image": "", "after_image": after})
    tokens = (options.image_size // options.patch_size) ** 2
    prepared = {**square_preparation(options), "image_seq_length": tokens}
    image = image_token_id(config, text=IMAGE, within=False)
    return {
        "text_config": {**text, "num_image_tokens": tokens},
        "vision_config": {**vision, "num_image_tokens": tokens},
        "image_token_index": image,
        "projection_dim": model.dim,
        "hidden_size": model.dim,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        **processor_files("PaliGemmaProcessor", prepared),
        **plain_template(config, IMAGE, around=False),
    }


def rules(config: Config) -> list[TensorRule]:
    """Names of all layouts, see `rules_with`."""
    return rules_with(config, {"linear": "proj"})


PALIGEMMA = {
    "paligemma": Architecture(
        class_name="PaliGemmaForConditionalGeneration",
        read=read,
        write=faithful("paligemma", write, read),
        rules=rules,
        ignored=unused_tensors(TOWER),
        beside=FILES,
        tokens=image_tokens(IMAGE, "image_token_index"),
        marks=starting(BOS),
    )
}
