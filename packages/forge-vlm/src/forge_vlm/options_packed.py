"""Options of encoders that see images in sizes of their own, and of what goes with them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.config import Problem, key, table
from forge_core.config.fields import evolve
from forge_vlm.geometry import PackedGeometry
from forge_vlm.geometry_packed import ClipRule
from forge_vlm.options import divided
from forge_vlm.statistics import CLIP_MEAN, CLIP_STD, mean_key, statistics_of, statistics_problems, std_key


@table
class PatchesOptions:
    """A vision transformer on patches of images in sizes of their own, with positions that rotate by row and
    column (Qwen2-VL; Wang et al. 2024); with windows, gates and RMSNorm that of Qwen2.5-VL (Bai et al. 2025).
    """

    patch_size: int = key(14, gt=0, unit="pixels", help="Height and width of a patch.")
    min_pixels: int = key(
        56 * 56,
        gt=0,
        unit="pixels",
        help="Smaller images are enlarged to at least so many pixels.",
        computes=False,
    )
    max_pixels: int = key(
        28 * 28 * 1280,
        gt=0,
        unit="pixels",
        help="Larger images are shrunk to at most so many pixels.",
        computes=False,
    )
    frames: int = key(
        2,
        gt=0,
        help="Frames of a video that a patch reaches over; an image is so many frames that are alike, and "
        "the last frame of a video is repeated as often as it takes.",
    )
    video_min_pixels: int | None = key(
        None,
        gt=0,
        unit="pixels",
        help="As min_pixels, of each frame of a video.",
        derived="min_pixels",
        computes=False,
    )
    video_max_pixels: int | None = key(
        None,
        gt=0,
        unit="pixels",
        help="As max_pixels, of each frame of a video.",
        derived="max_pixels",
        computes=False,
    )
    video_tokens: int | None = key(
        None,
        gt=0,
        unit="tokens",
        help="Nine tenths of so many tokens are the most of a video, of which each of its frames has an "
        "equal share; frames are shrunk to fit, but not below 1.05 times video_min_pixels.",
        derived="no bound",
        computes=False,
    )
    tokens_per_second: float = key(
        0.0,
        ge=0,
        help="Positions along time that a second of a video takes (Qwen2.5-VL), where model.rope_sections "
        "are set; 0: each step takes one (Qwen2-VL).",
    )
    dim: int = key(1280, gt=0, help="Width of a patch's token.")
    n_layers: int = key(32, gt=0, help="Blocks.")
    n_heads: int = key(16, gt=0, help="Attention heads.")
    hidden_dim: int = key(5120, gt=0, help="Width of the MLP.")
    activation: str = key(
        "quick_gelu", choices=("quick_gelu", "gelu", "silu"), help="Non-linearity of the MLP."
    )
    gated_mlp: bool = key(False, help="Three matrices in the MLP instead of two.")
    norm: str = key("layernorm", choices=("layernorm", "rmsnorm"), help="Kind of norm.")
    window: int = key(
        0,
        ge=0,
        unit="patches",
        help="Height and width of the windows of an image inside which patches see each other; 0: all of the "
        "image.",
    )
    full_layers: list[int] = key(
        factory=list, ge=0, help="Numbers of the blocks in which they see all of the image in any case."
    )

    resample: str = key(
        "bicubic", choices=("nearest", "bilinear", "bicubic", "lanczos"), help="How images are resized."
    )
    mean: list[float] = mean_key(CLIP_MEAN)
    std: list[float] = std_key(CLIP_STD)

    def problems(self) -> Iterator[Problem]:
        yield from statistics_problems(self)
        if self.dim % self.n_heads or self.dim // self.n_heads % 4:
            message = f"{self.dim} in {self.n_heads} heads: the width of a head has to be a multiple of 4"
            yield Problem("dim", message)
        if self.min_pixels > self.max_pixels:
            yield Problem("min_pixels", f"{self.min_pixels} is more than max_pixels = {self.max_pixels}")
        least, most = self.video_pixels
        if self.min_pixels <= self.max_pixels and least > most:
            yield Problem("video_min_pixels", f"{least} is more than video_max_pixels = {most}")
        if any(number >= self.n_layers for number in self.full_layers):
            yield Problem("full_layers", f"{self.full_layers} names blocks beyond n_layers = {self.n_layers}")

    @property
    def video_pixels(self) -> tuple[int, int]:
        """`video_min_pixels` and `video_max_pixels`, resolved."""
        return self.video_min_pixels or self.min_pixels, self.video_max_pixels or self.max_pixels

    def settled(self) -> PatchesOptions:
        """With nothing left to derive."""
        least, most = self.video_pixels
        return evolve(self, video_min_pixels=least, video_max_pixels=most)

    def geometry(self) -> PackedGeometry:
        least, most = self.video_pixels
        return PackedGeometry(
            patch=self.patch_size,
            dim=self.dim,
            least=self.min_pixels,
            most=self.max_pixels,
            frames=self.frames,
            clips=ClipRule(
                least=least,
                most=most,
                tokens=self.video_tokens,
                rate=self.tokens_per_second,
            ),
            resample=self.resample,
            **statistics_of(self),
        )


@table
class MergerOptions:
    """Squares of neighbouring patches side by side in one token, after a norm, then two matrices with a GELU
    between them (Qwen2-VL)."""

    side: int = key(2, gt=0, unit="patches", help="Height and width of the squares.")
    norm: str = key("layernorm", choices=("layernorm", "rmsnorm"), help="Kind of norm.")

    def tokens(self, grid: int) -> int:
        return divided(grid, self.side, "side") ** 2
