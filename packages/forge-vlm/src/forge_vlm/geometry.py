"""What an image is to the model: its size in pixels, its statistics, and how many tokens it becomes.

Everything here is known from the configuration alone, so lengths are checked before anything is built.
Imports no torch.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs

from forge_core.config import Config
from forge_core.errors import ForgeError
from forge_vlm.geometry_packed import Grid, PackedGeometry, Triple


@attrs.frozen(kw_only=True)
class ImageGeometry:
    """What an encoder of one size takes and gives; an encoder's options say it with `geometry()`.

    Attributes:
        size: height and width in pixels. grid: tokens along each side; the encoder gives grid * grid.
        dim: width of a token.
        mean, std: of each channel, for pixels from 0 to 1: the encoder sees (pixel / 255 - mean) / std.
        resample: how images are resized: nearest, bilinear or bicubic.
        crop: resize the shorter side and cut out the middle, rather than resize both sides.
        pad: put it onto a square of the mean colour before.
        longest: resize it before so that its longer side is this many pixels; None does not.
        split: a large picture is cut into pieces of `size`, see `forge_vlm.geometry_split`.
        extra: tokens that the encoder gives before those of the grid; -1: it leaves out the first of them.
    """

    kind: ClassVar[str] = "square"
    size: int
    grid: int
    dim: int
    mean: Triple = (0.5, 0.5, 0.5)
    std: Triple = (0.5, 0.5, 0.5)
    resample: str = "bicubic"
    crop: bool = False
    pad: bool = False
    longest: int | None = None
    split: bool = False
    extra: int = 0

    @property
    def patches(self) -> int:
        """Tokens of the encoder for an image."""
        return self.grid**2 + self.extra

    def behind(self, connector: Any) -> tuple[ImageGeometry, int]:
        """This geometry, and tokens of an image behind a connector, by its options or None for one to one.

        Raises:
            ValueError: they do not go together.
        """
        tokens = None if connector is None else getattr(connector, "tokens", None)
        if connector is not None and tokens is None:
            raise ValueError("it does not say how many tokens an image of this encoder has behind it")
        if self.extra and connector is not None and getattr(connector, "side", None) != 1:
            message = "a token stands before that" if self.extra > 0 else "a token is missing in that"
            raise ValueError(f"it works on square grids, and {message} of this encoder")
        return self, self.patches if tokens is None else int(tokens(self.grid)) + self.extra


@attrs.frozen(kw_only=True)
class TiledGeometry:
    """What an encoder takes and gives that sees an image as an arrangement of square tiles.

    An image keeps its shape: it is brought into the arrangement that fits it best, and what it does not fill
    is black on the right and below.

    Attributes:
        size: height and width of a tile in pixels. grid: patches along each side of it.
        tiles: most tiles of an image. An image has grid * grid + 1 tokens for each of so many tiles, of which
            those it has are looked at.
        dim, mean, std, resample: see `ImageGeometry`.
    """

    kind: ClassVar[str] = "tiled"
    size: int
    grid: int
    tiles: int
    dim: int
    mean: Triple = (0.5, 0.5, 0.5)
    std: Triple = (0.5, 0.5, 0.5)
    resample: str = "bilinear"

    @property
    def each(self) -> int:
        """Tokens of a tile: its patches and one for the whole."""
        return self.grid**2 + 1

    @property
    def patches(self) -> int:
        """Tokens of the encoder for an image."""
        return self.tiles * self.each

    @property
    def arrangements(self) -> list[tuple[int, int]]:
        """Tiles along height and width of all arrangements, in the order of their numbers, which start at
        1."""
        counts = range(1, self.tiles + 1)
        return [(a, b) for a in counts for b in counts if a * b <= self.tiles]

    def behind(self, connector: Any) -> tuple[TiledGeometry, int]:
        """This geometry, and tokens of an image behind a connector.

        Raises:
            ValueError: it changes their number.
        """
        if connector is not None and getattr(connector, "side", None) != 1:
            raise ValueError("tokens of tiles stay as many as they are")
        return self, self.patches

    def arrangement_of(self, height: int, width: int) -> tuple[int, int]:
        """Tiles along height and width of an image of these pixels: those that enlarge it least, or else
        shrink it least; of equal ones the fewest tiles."""
        scales = [min(a * self.size / height, b * self.size / width) for a, b in self.arrangements]
        larger = [scale for scale in scales if scale >= 1]
        best = min(larger) if larger else max(scales)
        fitting = [pair for pair, scale in zip(self.arrangements, scales, strict=True) if scale == best]
        return min(fitting, key=lambda pair: pair[0] * pair[1])

    def inside(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels that an image is resized to inside its arrangement."""
        rows, columns = self.arrangement_of(height, width)
        tall, wide = (
            min(max(side, self.size), count * self.size) for side, count in ((height, rows), (width, columns))
        )
        if wide / width < tall / height:
            return min(math.floor(height * wide / width) or 1, tall), wide
        return tall, min(math.floor(width * tall / height) or 1, wide)


Geometry = ImageGeometry | PackedGeometry | TiledGeometry


@attrs.frozen(kw_only=True)
class ImageShape:
    """How images enter the sequences of a run.

    Attributes:
        geometry: of the encoder.
        tokens: visual tokens of an image behind the connector; the most, where sizes differ.
        places: positions of the sequence that they take: `tokens`, or 0 where a fusion keeps them apart.
        most: images that one sequence can hold.
        patches: patches that they can have together, where sizes differ.
        marker: token of the text that stands where an image does; None: there is none.
        past_time: text goes on behind all of a clip, its time included, rather than behind its longer side.
    """

    geometry: Geometry
    tokens: int
    places: int
    most: int
    patches: int = 0
    marker: int | None = None
    past_time: bool = False

    @property
    def visual(self) -> int:
        """Most visual tokens of a sequence."""
        if isinstance(self.geometry, PackedGeometry):
            return self.patches // self.geometry.side**2
        return self.tokens * self.most

    @property
    def clips(self) -> bool:
        """Whether frames of a video are seen together, as one image that takes one slot."""
        return isinstance(self.geometry, PackedGeometry) and self.geometry.clips is not None

    def grid_of(self, height: int, width: int, frames: int = 0) -> Grid:
        """Patches along time, height and width of an image, or of a clip of so many `frames`; zeros where
        all are of one size, and nobody needs it."""
        geometry = self.geometry
        if not isinstance(geometry, PackedGeometry):
            return 0, 0, 0
        if frames:
            return geometry.clip_grid_of(frames, height, width)
        return 1, *geometry.grid_of(height, width)

    def places_of(self, grid: Grid) -> int:
        """Positions of the sequence that an image of these patches takes."""
        if not isinstance(self.geometry, PackedGeometry) or not self.places:
            return self.places
        return math.prod(grid) // self.geometry.side**2


def geometry_of(config: Config) -> Geometry:
    """Of the encoder that `[vlm.encoder]` picks.

    Raises:
        ForgeError: it does not say.
    """
    name = config.get("vlm").encoder.name
    options = config.options("vlm.encoder", name)
    say = getattr(options, "geometry", None)
    if say is None:
        raise ForgeError(f"the encoder {name} does not say its geometry", "its options need geometry()")
    found: Geometry = say()
    return found


def around_images(config: Any) -> tuple[str, str]:
    """Text before and behind every image; none without a configuration with `[vlm]`."""
    if config is None or "vlm" not in config:
        return "", ""
    vlm = config.get("vlm")
    return vlm.before_image, vlm.after_image


def shape_of(config: Config) -> ImageShape:
    """How images enter the sequences of this run.

    Raises:
        ForgeError: encoder or connector do not say, or do not go together.
    """
    vlm = config.get("vlm")
    name = vlm.connector.name
    try:
        geometry, tokens = geometry_of(config).behind(config.options("vlm.connector", name))
    except ValueError as error:
        raise ForgeError(f"the connector {name} does not fit the encoder: {error}") from error
    fusion = config.options("vlm", vlm.fusion)
    places = tokens if getattr(fusion, "in_sequence", True) else 0
    patches = vlm.max_patches or vlm.max_images * geometry.patches
    unit = geometry.side**2 if isinstance(geometry, PackedGeometry) else 1
    return ImageShape(
        geometry=geometry,
        tokens=tokens,
        places=places,
        most=vlm.max_images,
        patches=patches - patches % unit if isinstance(geometry, PackedGeometry) else 0,
        marker=vlm.image_token_id if getattr(fusion, "marked", False) else None,
        past_time=vlm.video.text_behind == "time",
    )


__all__ = [
    "Geometry",
    "Grid",
    "ImageGeometry",
    "ImageShape",
    "PackedGeometry",
    "TiledGeometry",
    "Triple",
    "around_images",
    "geometry_of",
    "shape_of",
]
