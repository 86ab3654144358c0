"""How pictures are prepared, in the files of a processor beside config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_vlm.architectures.around import TEMPLATE
from forge_vlm.encoders.keys import (
    PREPROCESSOR,
    PROCESSOR,
    RESAMPLING,
    image_processor,
    read_picture_keys,
)

HF = Mapping[str, Any]
FILES = (PREPROCESSOR, PROCESSOR, TEMPLATE)
"""Files that families here read and write, see `Architecture.beside`."""

_TYPES = {"crop": "CLIPImageProcessor", "stretch": "SiglipImageProcessor", "pad": "LlavaImageProcessor"}


def read_pictures(config: HF, size: int | None) -> dict[str, Any]:
    """Options of an encoder about pictures, those that the files say.

    Args:
        config: theirs, with the contents of `FILES` that are there.
        size: pictures that the tower takes, in pixels.

    Raises:
        ForgeError: they are prepared in a way that is not offered.
    """
    return read_picture_keys(image_processor(config), size)


def common_preparation(options: Any) -> dict[str, Any]:
    """What all image processors have, from settled options of an encoder."""
    return {
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(options.mean),
        "image_std": list(options.std),
        "resample": RESAMPLING.index(options.resample),
    }


def square_preparation(options: Any) -> dict[str, Any]:
    """An image processor whose pictures are of one size."""
    size = options.image_size
    both, fit = {"height": size, "width": size}, options.fit
    keys = {**common_preparation(options), "image_processor_type": _TYPES[fit]}
    if fit == "stretch":
        return {**keys, "size": both}
    keys |= {"size": {"shortest_edge": size}, "crop_size": both, "do_center_crop": True}
    return {**keys, "do_pad": True} if fit == "pad" else keys


def processor_files(processor: str, prepared: HF, **more: Any) -> dict[str, dict[str, Any]]:
    """Those of `FILES` that are about pictures, for both releases of transformers.

    Args:
        processor: class of the processor.
        prepared: configuration of its image processor.
        more: what else the processor's own configuration says.
    """
    inside = {**prepared, "processor_class": processor}
    return {
        PREPROCESSOR: inside,
        PROCESSOR: {"processor_class": processor, "image_processor": dict(inside), **more},
    }
