"""The vision tower inside a family that sees: its nested configuration and the names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge_core.config import Config
from forge_core.contract import TensorRule, UnsuitedError
from forge_core.contract.architecture import rename
from forge_core.errors import ForgeError
from forge_vlm.encoders.keys import read_tower_keys, write_tower_keys
from forge_vlm.table import VlmConfig

HF = Mapping[str, Any]
ENCODER = "encoder.tower."
"""What comes before the names of a tower's parameters inside a model that sees."""

KINDS = {
    "clip_vision_model": "clip",
    "siglip_vision_model": "siglip",
    "idefics3": "idefics3",
    "idefics3_vision": "idefics3",
    "smolvlm": "idefics3",
    "smolvlm_vision": "idefics3",
}
"""Our encoders by the `model_type` of a `vision_config`."""

FAMILIES = {
    "clip": "LLaVA (connector mlp)",
    "siglip": "LLaVA (connector mlp) and PaliGemma (connector linear)",
    "idefics3": "Idefics 3 and SmolVLM (connector pixel_shuffle)",
    "patches": "Qwen2-VL and Qwen2.5-VL (connector patch_merger)",
    "tiles": "Llama 3.2 Vision (connector linear)",
}
"""Which families have an encoder, in words for people."""

_LAYER = "encoder.layers.{layer}."
_PLAIN = (
    "embeddings.class_embedding",
    "embeddings.patch_embedding.weight",
    "embeddings.patch_embedding.bias",
)
_PAIRS = (
    "pre_layrnorm",
    "post_layernorm",
    *(f"{_LAYER}self_attn.{x}_proj" for x in ("q", "k", "v", "out")),
    *(f"{_LAYER}{name}" for name in ("layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2")),
)
TENSORS = (
    "embeddings.class_embedding",
    "embeddings.patch_embedding.weight",
    "embeddings.patch_embedding.bias",
    "embeddings.position_embedding.weight",
    *(f"{name}.{part}" for name in _PAIRS for part in ("weight", "bias")),
)
"""Names inside a tower of CLIP, SigLIP or Idefics 3, each of which has most of them."""

UNUSED = (
    "embeddings.position_ids",
    "head.probe",
    "head.attention.in_proj_weight",
    "head.attention.in_proj_bias",
    *(
        f"head.{name}.{part}"
        for name in ("attention.out_proj", "layernorm", "mlp.fc1", "mlp.fc2")
        for part in ("weight", "bias")
    ),
)
"""A buffer of old files, and SigLIP's pooling head, which takes no part in what a decoder sees."""


def read_tower(vision: HF, default: str, layer: int | None = None) -> tuple[str, dict[str, Any]]:
    """Name and options of our encoder from a nested `vision_config`.

    Args:
        vision: theirs.
        default: the `model_type` where it says none.
        layer: index of the states that are taken, None: the last ones after the last norm.

    Raises:
        ForgeError: a tower that is not offered.
    """
    kind = vision.get("model_type", default)
    if kind not in KINDS:
        raise ForgeError(f"a vision tower of type {kind!r} is not offered", f"one of {', '.join(KINDS)} is")
    options = read_tower_keys(vision)
    return KINDS[kind], options if layer is None else {**options, "layer": layer}


def write_tower(config: Config, kinds: Mapping[str, str]) -> dict[str, Any]:
    """The nested `vision_config` of the encoder.

    Args:
        config: resolved.
        kinds: `model_type` by name of the encoders that the family may have.

    Raises:
        UnsuitedError: the encoder is another one.
    """
    name = config[VlmConfig].encoder.name
    if name not in kinds:
        raise UnsuitedError(f"its encoder is {' or '.join(kinds)}, not vlm.encoder.name = {name}")
    return {"model_type": kinds[name], "num_channels": 3, **write_tower_keys(tower_options(config))}


def check_encoder(config: Config) -> None:
    """Whether any family here has the encoder at all.

    Raises:
        UnsuitedError: none has; says which encoders there are.
    """
    name = config[VlmConfig].encoder.name
    if name not in FAMILIES:
        there = "; ".join(f"{encoder} is of {families}" for encoder, families in FAMILIES.items())
        raise UnsuitedError(
            f"no family has the encoder of vlm.encoder.name = {name}: {there}",
            "train with one of these, such as clip with vlm.connector.name = mlp; weights of another encoder "
            "fit none of them",
        )


def tower_options(config: Config) -> Any:
    """Options of the encoder with what its checkpoint says filled in."""
    options: Any = config.options("vlm.encoder", config[VlmConfig].encoder.name)
    return options.settled()


def tower_rules(prefixes: Sequence[str]) -> list[TensorRule]:
    """Rules of a tower's tensors.

    Args:
        prefixes: what comes before their names in each layout of their files, with its dot; the first is the
            one that is written.
    """
    return [rename(f"{prefix}{name}", f"{ENCODER}{name}") for prefix in prefixes for name in TENSORS]


def unused_tensors(prefixes: Sequence[str]) -> tuple[str, ...]:
    """Names of theirs that carry nothing, see `Architecture.ignored`."""
    return tuple(f"{prefix}{name}" for prefix in prefixes for name in UNUSED)


__all__ = [
    "ENCODER",
    "FAMILIES",
    "KINDS",
    "TENSORS",
    "check_encoder",
    "read_tower",
    "tower_options",
    "tower_rules",
    "unused_tensors",
    "write_tower",
]
