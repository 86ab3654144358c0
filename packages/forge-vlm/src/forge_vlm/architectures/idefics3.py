"""Idefics 3 and SmolVLM (Laurençon et al. 2024; Marafioti et al. 2025): a SigLIP tower whose neighbouring
tokens become one, and a dense decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from forge_core.config import Config
from forge_core.config.tables import ModelConfig
from forge_core.contract import Architecture, TensorRule, UnsuitedError
from forge_core.contract.architecture import rename
from forge_core.errors import ForgeError
from forge_vlm.architectures.around import check_marks, marked, plain_template
from forge_vlm.architectures.faithful import faithful
from forge_vlm.architectures.pictures import FILES, common_preparation, processor_files
from forge_vlm.architectures.sizes import image_token_id, image_tokens, with_room
from forge_vlm.architectures.text import read_text, text_rules, write_text
from forge_vlm.architectures.towers import (
    read_tower,
    tower_options,
    tower_rules,
    unused_tensors,
    write_tower,
)
from forge_vlm.encoders.keys import image_processor, read_picture_keys
from forge_vlm.geometry_split import most_pieces
from forge_vlm.marks import FAKE, SAID, WHOLE
from forge_vlm.options import Idefics3Options, PixelShuffleOptions
from forge_vlm.table import VlmConfig

HF = Mapping[str, Any]
IMAGE = "<image>"
TEXT = (("model.text_model.", "lm_head"),)
TOWER = ("model.vision_model.",)
PROJECTION = "model.connector.modality_projection.proj."
_SIZE, _PATCH = 224, 32
_MARKS = 3
"""Tokens around a piece, about."""
MARKS: dict[str, Any] = {
    "before_image": f"{FAKE}{WHOLE}",
    "after_image": FAKE,
    "pieces": {
        "before": f"{FAKE}<row_{{row}}_col_{{column}}>",
        "after_row": "\n",
        "after_all": "\n",
    },
}
"""What the processor puts around pictures and their pieces."""


def read(config: HF) -> dict[str, dict[str, Any]]:
    """Tables of an Idefics 3 or SmolVLM.

    Raises:
        ForgeError: a tower that is not offered, or patches that do not come out even.
    """
    text = config.get("text_config") or {"rms_norm_eps": 1e-5}
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    model = read_text({**config, "text_config": text}, tied=tied)
    name, tower = read_tower(config.get("vision_config") or {}, "idefics3_vision")
    if name != "idefics3":
        raise ForgeError(f"an Idefics 3 with the tower {name} is not offered")
    tower |= _read_pictures(image_processor(config), tower.get("image_size", _SIZE))
    factor = config.get("scale_factor", 2)
    grid = tower.get("image_size", _SIZE) // tower.get("patch_size", _PATCH)
    if grid % factor:
        raise ForgeError(f"scale_factor = {factor} does not divide {grid} patches")
    vlm = {
        "fusion": "joint",
        **MARKS,
        "image_token_id": config.get("image_token_id", 128257),
        "encoder": {"name": name, name: tower},
        "connector": {"name": "pixel_shuffle", "pixel_shuffle": {"factor": factor, "bias": False}},
    }
    most = most_pieces(Idefics3Options(**tower).geometry())
    tokens = (grid // factor) ** 2 + (_MARKS if most > 1 else 0)
    return with_room(model, {**vlm, "max_images": most}, tokens)


def for_training(
    tables: Mapping[str, Mapping[str, Any]],
) -> tuple[Mapping[str, Mapping[str, Any]], Sequence[str]]:
    """`Architecture.for_training`: says what it costs that pictures are cut."""
    most = tables["vlm"]["max_images"]
    if most == 1:
        return tables, ()
    line = (
        f"a picture becomes up to {most} images, as the folder says, for which vlm.max_images = {most} and "
        f"train.seq_len = {tables['train']['seq_len']} have room: a smaller longest_edge in "
        "[vlm.encoder.idefics3] makes fewer, and split = false there one"
    )
    return tables, (line,)


def _read_pictures(said: HF, size: int) -> dict[str, Any]:
    """A picture's longer side is resized first, then both sides, or it is cut into pieces."""
    if not said:
        return {}
    found = read_picture_keys({k: v for k, v in said.items() if k != "size"}, None)
    piece = (said.get("max_image_size") or {}).get("longest_edge", size)
    if piece != size:
        raise ForgeError(f"pieces of pictures are of {piece} pixels, and the tower takes {size}")
    if said.get("do_resize", True):
        found["longest_edge"] = (said.get("size") or {}).get("longest_edge", 4 * 364)
    return found | {"split": bool(said.get("do_image_splitting", True))}


def write(config: Config, *, kind: str, prefix: str) -> dict[str, Any]:
    """Keys and files of a family.

    Args:
        kind: `model_type` of the tower. prefix: of the names of its processors.

    Raises:
        UnsuitedError: another encoder or connector, or other text around pictures.
    """
    vlm, model = config[VlmConfig], config[ModelConfig]
    vision, text = write_tower(config, {"idefics3": kind}), write_text(config)
    connector = config.options("vlm.connector", vlm.connector.name)
    if not isinstance(connector, PixelShuffleOptions):
        raise UnsuitedError(f"{kind} has a pixel shuffle, not vlm.connector.name = {vlm.connector.name}")
    options = tower_options(config)
    check_marks(config, {key: text for key, text in MARKS.items() if options.split or key != "pieces"})
    longest = options.longest_edge
    prepared = {
        **common_preparation(options),
        "image_processor_type": f"{prefix}ImageProcessor",
        "do_resize": longest is not None,
        "size": {"longest_edge": longest or options.image_size},
        "max_image_size": {"longest_edge": options.image_size},
        "do_image_splitting": options.split,
        "do_pad": True,
    }
    tokens = connector.tokens(options.image_size // options.patch_size)
    return {
        "text_config": text,
        "vision_config": vision,
        "image_token_id": image_token_id(config, text=IMAGE, within=True),
        "scale_factor": connector.factor,
        "tie_word_embeddings": model.tie_embeddings,
        "use_cache": True,
        **processor_files(f"{prefix}Processor", prepared, image_seq_len=tokens),
        **plain_template(config, IMAGE, around=False),
    }


def rules(config: Config) -> list[TensorRule]:
    """Names, which are the same in all releases."""
    connector = [rename(f"{PROJECTION}{part}", f"connector.proj.{part}") for part in ("weight", "bias")]
    return [*text_rules(config, TEXT), *tower_rules(TOWER), *connector]


def _architecture(name: str, class_name: str, kind: str, prefix: str) -> Architecture:
    return Architecture(
        class_name=class_name,
        read=read,
        write=faithful(name, partial(write, kind=kind, prefix=prefix), read),
        rules=rules,
        ignored=unused_tensors(TOWER),
        beside=FILES,
        tokens=image_tokens(IMAGE, "image_token_id"),
        marks=marked(WHOLE, always=(FAKE, SAID)),
        for_training=for_training,
    )


IDEFICS3 = {
    "idefics3": _architecture("idefics3", "Idefics3ForConditionalGeneration", "idefics3_vision", "Idefics3"),
    "smolvlm": _architecture("smolvlm", "SmolVLMForConditionalGeneration", "smolvlm_vision", "SmolVLM"),
}
