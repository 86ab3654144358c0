"""Options of an encoder that sees images in tiles, and of the fusion that goes with it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from forge_core.config import Problem, key, table
from forge_vlm.geometry import TiledGeometry
from forge_vlm.statistics import mean_key, statistics_of, statistics_problems, std_key


@table
class TilesOptions:
    """A vision transformer on tiles of an image: each has a place in the arrangement, and all see each other;
    a second, gated transformer follows, and states of some blocks are part of what comes out (Llama 3.2
    Vision; Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 7.1)."""

    image_size: int = key(448, gt=0, unit="pixels", help="Height and width of a tile.")
    patch_size: int = key(14, gt=0, unit="pixels", help="Height and width of a patch.")
    max_tiles: int = key(4, gt=0, unit="tiles", help="Most tiles of an image.")
    dim: int = key(1280, gt=0, help="Width inside.")
    n_layers: int = key(32, gt=0, help="Blocks.")
    n_global_layers: int = key(8, gt=0, help="Gated blocks behind them.")
    n_heads: int = key(16, gt=0, help="Attention heads.")
    hidden_dim: int = key(5120, gt=0, help="Width of the MLP.")
    activation: str = key("gelu", choices=("gelu", "quick_gelu", "silu"), help="Non-linearity of the MLP.")
    norm_eps: float = key(1e-5, gt=0, help="Epsilon of the norms inside the blocks.")
    taken: list[int] = key(
        factory=lambda: [3, 7, 15, 23, 30],
        ge=0,
        help="Numbers of the blocks whose states stand beside the last ones.",
    )
    resample: str = key(
        "bilinear", choices=("nearest", "bilinear", "bicubic", "lanczos"), help="How images are resized."
    )
    mean: list[float] = mean_key()
    std: list[float] = std_key()

    def problems(self) -> Iterator[Problem]:
        if self.image_size % self.patch_size:
            yield Problem("image_size", f"{self.image_size} is no multiple of patch_size = {self.patch_size}")
        if self.dim % self.n_heads:
            yield Problem("dim", f"{self.dim} is no multiple of n_heads = {self.n_heads}")
        if any(number >= self.n_layers for number in self.taken):
            yield Problem("taken", f"{self.taken} names blocks beyond n_layers = {self.n_layers}")
        yield from statistics_problems(self)

    @property
    def out_dim(self) -> int:
        """Width of what comes out."""
        return self.dim * (1 + len(self.taken))

    def geometry(self) -> TiledGeometry:
        return TiledGeometry(
            size=self.image_size,
            grid=self.image_size // self.patch_size,
            tiles=self.max_tiles,
            dim=self.out_dim,
            resample=self.resample,
            **statistics_of(self),
        )


@table
class GatedCrossOptions:
    """Blocks of the decoder in which text asks visual tokens in place of text (Llama 3.2 Vision). What they
    add is multiplied by the tanh of gates that start at 0."""

    in_sequence: ClassVar[bool] = False
    layers: list[int] = key(
        factory=lambda: [3, 8, 13, 18, 23, 28, 33, 38],
        ge=0,
        help="Numbers of the blocks of the decoder that are such blocks.",
    )
    extra_tokens: int = key(
        8, ge=0, unit="tokens", help="Rows of the embedding behind the vocabulary, which nothing predicts."
    )
    before_images: str = key(
        "all",
        choices=("all", "none"),
        help="What text before the first image of its document sees: all images of the document, in the "
        "attention of these blocks and not in their MLP, as transformers runs these models; or none.",
    )
    marked: bool = key(
        True,
        help="Let the token vlm.image_token_id stand in the text where an image does.",
    )
