"""Images and clips in sizes of their own, as patches that stand one after another.

Imports no torch.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs

Triple = tuple[float, float, float]
Grid = tuple[int, int, int]
"""Patches along time, height and width."""
THINNEST = 200
"""Longest side of an image over its shortest, at most."""
_SHARE, _GROWTH = 0.9, 1.05
"""Of `ClipRule`: the share of its tokens that a clip may take, and what is over the least pixels at least."""


@attrs.frozen(kw_only=True)
class ClipRule:
    """How large the frames of a clip are, and how much time is one position.

    Attributes:
        least, most: pixels of a frame when resized.
        tokens: room of which a clip takes at most nine tenths: of longer clips frames have fewer pixels, but
            not below 1.05 times `least`; None: no bound (the video processor of Qwen2-VL in transformers).
        rate: positions along time that a second takes; 0: one for each step of the grid.
    """

    least: int
    most: int
    tokens: int | None = None
    rate: float = 0.0


@attrs.frozen(kw_only=True)
class PackedGeometry:
    """What an encoder takes and gives that sees images in sizes of their own, as patches that stand one
    after another (NaViT; Dehghani et al. 2023).

    An image keeps its shape: it is brought to a whole number of patches, or of squares of `side` x `side`
    patches that the connector joins, with between `least` and `most` pixels.

    Attributes:
        patch: height and width of a patch in pixels; it is a token of the encoder. dim: its width.
        least, most: pixels of an image when resized.
        frames: frames of a video that a patch reaches over; an image is so many frames that are alike.
        clips: how the frames of a video are seen together; None: they are images of their own.
        side: patches along each side of what becomes one token behind the connector, which says it.
        mean, std, resample: see `ImageGeometry`.
    """

    kind: ClassVar[str] = "packed"
    patch: int
    dim: int
    least: int
    most: int
    frames: int = 1
    clips: ClipRule | None = None
    side: int = 1
    mean: Triple = (0.5, 0.5, 0.5)
    std: Triple = (0.5, 0.5, 0.5)
    resample: str = "bicubic"

    @property
    def patches(self) -> int:
        """Most patches of an image that is not far longer than wide."""
        return self.most // (self.patch * self.side) ** 2 * self.side**2

    @property
    def width(self) -> int:
        """Numbers of a patch: three channels, each of `frames` squares."""
        return 3 * self.frames * self.patch**2

    def behind(self, connector: Any) -> tuple[PackedGeometry, int]:
        """This geometry with the connector's `side`, and most tokens of an image.

        Raises:
            ValueError: the connector does not say how many neighbours it joins, or no image would be left.
        """
        side = 1 if connector is None else getattr(connector, "side", None)
        if side is None:
            raise ValueError("it works on square grids, and this encoder's images have sizes of their own")
        mine = attrs.evolve(self, side=side)
        if not mine.patches:
            raise ValueError(f"{self.most} pixels are not one square of {side} x {side} patches")
        return mine, mine.patches // side**2

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Patches along height and width of an image of these pixels (Qwen2-VL; Wang et al. 2024).

        Raises:
            ValueError: it is far longer than wide, or has no pixels.
        """
        return self._within(height, width, self.least, self.most)

    def clip_grid_of(self, frames: int, height: int, width: int) -> Grid:
        """Patches along time, height and width of a clip of `frames` frames of these pixels; the last one
        stands for those that are missing to a whole patch.

        Raises:
            ValueError: see `grid_of`.
        """
        tall, wide = self._within(height, width, self._least, self.clip_pixels(frames))
        return -(-frames // self.frames), tall, wide

    def clip_pixels(self, frames: int) -> int:
        """Most pixels of each of so many frames when resized."""
        rule = self.clips
        if rule is None or rule.tokens is None:
            return self.most if rule is None else rule.most
        together = int(rule.tokens * (self.patch * self.side) ** 2 * _SHARE)
        return max(min(rule.most, together * self.frames // frames), int(rule.least * _GROWTH))

    def clip_patches(self, frames: int) -> int:
        """Most patches of a clip of so many frames that are not far longer than wide."""
        squares = max(self.clip_pixels(frames), self._least) // (self.patch * self.side) ** 2
        return -(-frames // self.frames) * squares * self.side**2

    @property
    def _least(self) -> int:
        return self.least if self.clips is None else self.clips.least

    def _within(self, height: int, width: int, least: int, most: int) -> tuple[int, int]:
        if min(height, width) < 1 or max(height, width) > THINNEST * min(height, width):
            raise ValueError(f"{height} x {width} pixels: one side is more than {THINNEST} times the other")
        unit = self.patch * self.side
        sides = [round(n / unit) * unit for n in (height, width)]
        if sides[0] * sides[1] > most:
            shrink = math.sqrt(height * width / most)
            sides = [max(unit, math.floor(n / shrink / unit) * unit) for n in (height, width)]
        elif sides[0] * sides[1] < least:
            grow = math.sqrt(least / (height * width))
            sides = [math.ceil(n * grow / unit) * unit for n in (height, width)]
        return sides[0] // self.patch, sides[1] // self.patch
