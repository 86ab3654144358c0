"""What an image is to the model: its size in pixels, its statistics, and how many tokens it becomes.

Everything here is known from the configuration alone, so lengths are checked before anything is built.
Imports no torch.
"""

from __future__ import annotations

from typing import Any

import attrs

from forge_core.config import Config
from forge_core.errors import ForgeError

Triple = tuple[float, float, float]


@attrs.frozen(kw_only=True)
class ImageGeometry:
    """What an encoder takes and gives; an encoder's options say it with `geometry()`.

    Attributes:
        size: height and width in pixels. grid: tokens along each side; the encoder gives grid * grid.
        dim: width of a token.
        mean, std: of each channel, for pixels from 0 to 1: the encoder sees (pixel / 255 - mean) / std.
        resample: how images are resized: nearest, bilinear or bicubic.
        crop: resize the shorter side and cut out the middle, rather than resize both sides.
    """

    size: int
    grid: int
    dim: int
    mean: Triple = (0.5, 0.5, 0.5)
    std: Triple = (0.5, 0.5, 0.5)
    resample: str = "bicubic"
    crop: bool = False


@attrs.frozen(kw_only=True)
class ImageShape:
    """How images enter the sequences of a run.

    Attributes:
        geometry: of the encoder.
        tokens: visual tokens of an image behind the connector.
        places: positions of the sequence that an image takes: `tokens`, or 0 where a fusion keeps them apart.
        most: images that one sequence can hold.
    """

    geometry: ImageGeometry
    tokens: int
    places: int
    most: int


def geometry_of(config: Config) -> ImageGeometry:
    """Of the encoder that `[vlm.encoder]` picks.

    Raises:
        ForgeError: it does not say.
    """
    name = config.get("vlm").encoder.name
    options = config.options("vlm.encoder", name)
    say = getattr(options, "geometry", None)
    if say is None:
        raise ForgeError(f"the encoder {name} does not say its geometry", "its options need geometry()")
    found: ImageGeometry = say()
    return found


def shape_of(config: Config) -> ImageShape:
    """How images enter the sequences of this run.

    Raises:
        ForgeError: encoder or connector do not say, or do not go together.
    """
    vlm = config.get("vlm")
    geometry = geometry_of(config)
    name = vlm.connector.name
    options: Any = config.options("vlm.connector", name)
    try:
        tokens = geometry.grid**2 if options is None else int(options.tokens(geometry.grid))
    except ValueError as error:
        raise ForgeError(f"the connector {name} does not fit the encoder: {error}") from error
    fusion = config.options("vlm", vlm.fusion)
    places = tokens if getattr(fusion, "in_sequence", True) else 0
    return ImageShape(geometry=geometry, tokens=tokens, places=places, most=vlm.max_images)
