"""Qwen2-VL (Wang et al. 2024) and Qwen2.5-VL (Bai et al. 2025): images in sizes of their own, positions on
three axes, and Qwen 2 as decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from forge_core.config import Config
from forge_core.config.fields import evolve
from forge_core.config.tables import ModelConfig
from forge_core.contract import Architecture, TensorRule, UnsuitedError
from forge_core.contract.architecture import InputToken
from forge_core.model.architectures import ARCHITECTURES as DENSE
from forge_vlm.architectures.around import mark_id, marked, plain_template
from forge_vlm.architectures.faithful import faithful
from forge_vlm.architectures.qwen_pictures import (
    QWEN_FILES,
    read_preparation,
    read_sampling,
    write_preparation,
)
from forge_vlm.architectures.qwen_vision import read_vision, vision_rules, write_vision
from forge_vlm.architectures.sizes import KEY, VIDEO_KEY, image_token_id, modest, video_token_id, with_room
from forge_vlm.architectures.text import text_rules
from forge_vlm.marks import START, STOP
from forge_vlm.options_packed import MergerOptions, PatchesOptions
from forge_vlm.table import VlmConfig

HF = Mapping[str, Any]
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
MARKS = {"vision_start_token_id": START, "vision_end_token_id": STOP}
"""Ids that release 4 of transformers looks for, and the tokens that have them."""
TEXT = (("model.", "lm_head"), ("model.language_model.", "lm_head"))

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
_IMAGE_TOKEN, _VIDEO_TOKEN = 151655, 151656


def read_text(config: HF) -> dict[str, Any]:
    """Keys of `[model]`; files of the first releases have those of the decoder beside those of the whole."""
    text = {**_TEXT, **(config.get("text_config") or config)}
    text.pop("head_dim", None)  # heads are as wide as they divide the model there
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
    encoder, side = read_vision(config, model["dim"], windowed=windowed)
    patch, frames = encoder["patch_size"], encoder["frames"]
    encoder |= read_preparation(config, patch, side, frames)
    vlm = {
        "fusion": "joint",
        "before_image": START,
        "after_image": STOP,
        "image_token_id": config.get("image_token_id", _IMAGE_TOKEN),
        "video_token_id": config.get("video_token_id", _VIDEO_TOKEN),
        "encoder": {"name": "patches", "patches": encoder},
        "connector": {
            "name": "patch_merger",
            "patch_merger": {"side": side, "norm": encoder["norm"]},
        },
        "video": read_sampling(config, frames),
    }
    most = PatchesOptions(**encoder).geometry().most
    return with_room(model, vlm, most // (patch * side) ** 2)


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
    vision = write_vision(encoder, merger, model, windowed=windowed)
    image = image_token_id(config, text=IMAGE, within=True)
    marks = {key: mark_id(config, text) for key, text in MARKS.items()}
    return {
        "text_config": _write_text(config, f"{name}_text"),
        "vision_config": vision,
        "image_token_id": image,
        "video_token_id": video_token_id(config, text=VIDEO, image=image, usual=_VIDEO_TOKEN),
        **{key: found for key, found in marks.items() if found is not None},
        "tie_word_embeddings": model.tie_embeddings,
        **write_preparation(
            config, encoder, merger, "Qwen2_5_VLProcessor" if windowed else "Qwen2VLProcessor"
        ),
        **plain_template(config, IMAGE),
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


def rules(config: Config, *, windowed: bool) -> list[TensorRule]:
    """Names; the first layout of the two is the one that is written."""
    encoder: PatchesOptions = config.options("vlm.encoder", "patches")  # type: ignore[assignment]
    return [*text_rules(config, TEXT), *vision_rules(encoder, windowed=windowed)]


def tokens(keys: HF) -> Sequence[InputToken]:
    """What stands for an image, and for a video where the vocabulary has it."""
    found = [InputToken(IMAGE, keys["image_token_id"], KEY)]
    if keys["video_token_id"] < keys["text_config"]["vocab_size"]:
        found.append(InputToken(VIDEO, keys["video_token_id"], VIDEO_KEY))
    return found


def _architecture(name: str, class_name: str, windowed: bool) -> Architecture:
    reading = partial(read, windowed=windowed)
    return Architecture(
        class_name=class_name,
        read=reading,
        write=faithful(name, partial(write, windowed=windowed), reading),
        rules=partial(rules, windowed=windowed),
        beside=QWEN_FILES,
        tokens=tokens,
        marks=marked(START, STOP),
        for_training=modest,
    )


QWEN_VL = {
    "qwen2_vl": _architecture("qwen2_vl", "Qwen2VLForConditionalGeneration", False),
    "qwen2_5_vl": _architecture("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", True),
}
