"""What a checkpoint of a vision tower says of it, in the keys of our options. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_core.errors import ForgeError
from forge_core.files import user_path
from forge_core.model.architectures.table import ACTIVATIONS, THEIR_ACTIVATIONS

HF = Mapping[str, Any]
CONFIG, PREPROCESSOR, PROCESSOR = "config.json", "preprocessor_config.json", "processor_config.json"

SIZES = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "activation": "hidden_act",
    "norm_eps": "layer_norm_eps",
}
"""Keys of a tower's options and what a `vision_config` calls them."""

RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Ways to resize, in the order of Pillow's numbers, which processors' files use."""

THEIRS = {**THEIR_ACTIVATIONS, "quick_gelu": "quick_gelu"}
OURS = {**ACTIVATIONS, "quick_gelu": "quick_gelu"}
_RESCALE = 1 / 255


def read_tower_keys(vision: HF) -> dict[str, Any]:
    """Options of a tower from a `vision_config`, those that it says.

    Raises:
        ForgeError: pictures or patches that are not square, another number of channels, or an activation that
            is not offered.
    """
    found: dict[str, Any] = {
        ours: vision[theirs] for ours, theirs in SIZES.items() if vision.get(theirs) is not None
    }
    for name in ("image_size", "patch_size"):
        if isinstance(found.get(name), list | tuple):
            if len(set(found[name])) != 1:
                raise ForgeError(f"{name} of the vision tower is {found[name]}, which is not square")
            found[name] = found[name][0]
    if vision.get("num_channels", 3) != 3:
        raise ForgeError(f"the vision tower takes {vision['num_channels']} channels, not 3")
    if "activation" in found:
        if found["activation"] not in OURS:
            raise ForgeError(f"the activation {found['activation']!r} of the vision tower is not offered")
        found["activation"] = OURS[found["activation"]]
    if "norm_eps" in found:
        found["norm_eps"] = float(found["norm_eps"])
    return found


def write_tower_keys(options: Any) -> dict[str, Any]:
    """A `vision_config` of settled options."""
    values = {theirs: getattr(options, ours) for ours, theirs in SIZES.items()}
    return {**values, "hidden_act": THEIRS[options.activation]}


def read_picture_keys(said: HF, size: int | None) -> dict[str, Any]:
    """Options about pictures from a processor's configuration: `mean`, `std`, `resample`, `fit`.

    Args:
        said: of the image processor; empty: nothing is known.
        size: pictures that the tower takes, in pixels; None: not known.

    Raises:
        ForgeError: pictures are prepared in a way that is not offered.
    """
    found: dict[str, Any] = {}
    if said.get("do_normalize", True):
        given = {ours: said.get(f"image_{ours}") for ours in ("mean", "std")}
        found |= {ours: list(values) for ours, values in given.items() if values is not None}
    else:
        found |= {"mean": [0.0] * 3, "std": [1.0] * 3}
    factor = said.get("rescale_factor") if said.get("do_rescale", True) else 1.0
    if factor is not None and abs(factor - _RESCALE) > 1e-9:
        raise ForgeError(f"pictures are rescaled by {factor}, not by 1 / 255")
    if said.get("resample") is not None:
        found["resample"] = _resampling(said["resample"])
    fit = _fit(said)
    if fit is not None:
        found["fit"] = fit
        sides = {*_sides(said.get("size")), *(_sides(said.get("crop_size")) if fit != "stretch" else ())}
        if size is not None and sides - {size}:
            raise ForgeError(f"pictures are brought to {sorted(sides)} pixels, and the tower takes {size}")
    return found


def _resampling(number: Any) -> str:
    if not isinstance(number, int) or not 0 <= number < len(RESAMPLING):
        raise ForgeError(f"pictures are resized by {number!r}, which is no way of Pillow's")
    return RESAMPLING[number]


def _fit(said: HF) -> str | None:
    """How a picture becomes a square; None: the file does not say."""
    size = said.get("size")
    if size is None:
        return None
    if not isinstance(size, int | Mapping):
        raise ForgeError(f"pictures are brought to {size!r}, which is neither a side nor sides by name")
    if said.get("do_pad"):
        return "pad"
    shortest = isinstance(size, int) or "shortest_edge" in size
    if shortest and not said.get("do_center_crop", True):
        raise ForgeError("pictures keep their shape, which this tower cannot take")
    return "crop" if shortest else "stretch"


def _sides(size: Any) -> list[int]:
    if size is None:
        return []
    return [size] if isinstance(size, int) else [v for v in size.values() if isinstance(v, int)]


def image_processor(files: HF) -> HF:
    """The image processor's configuration: release 5 of transformers writes it inside
    `processor_config.json`, release 4 as `preprocessor_config.json`. Empty where there is neither.

    Args:
        files: contents of JSON files by name.
    """
    inside = (files.get(PROCESSOR) or {}).get("image_processor")
    found: HF = inside or files.get(PREPROCESSOR) or {}
    return found


def read_files(folder: Path) -> dict[str, HF]:
    """The JSON files of a folder that are about a tower and its pictures.

    Raises:
        ForgeError: there is no config.json, or a file is no JSON object.
    """
    found: dict[str, HF] = {}
    for name in (CONFIG, PREPROCESSOR, PROCESSOR):
        file = folder / name
        if name != CONFIG and not file.is_file():
            continue
        try:
            content = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            hint = "path is a folder of Hugging Face, with config.json and safetensors"
            raise ForgeError(f"cannot read what an encoder is like from {file}: {error}", hint) from error
        if not isinstance(content, dict):
            raise ForgeError(f"{file} is not a JSON object")
        found[name] = content
    return found


def read_checkpoint(path: str) -> dict[str, Any]:
    """Options of a tower from the folder of its checkpoint, of a tower alone or inside a larger model.

    Raises:
        ForgeError: see `read_files`, `read_tower_keys`, `read_picture_keys`.
    """
    files = read_files(user_path(path))
    vision = read_tower_keys(files[CONFIG].get("vision_config") or files[CONFIG])
    return {**vision, **read_picture_keys(image_processor(files), vision.get("image_size"))}
