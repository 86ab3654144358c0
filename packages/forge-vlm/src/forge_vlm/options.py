"""Options of encoders, connectors and fusions. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from forge_core.config import Problem, key, table
from forge_core.errors import ForgeError
from forge_vlm.geometry import ImageGeometry, Triple


@table
class VitOptions:
    """A small vision transformer of our own (Dosovitskiy et al. 2021), with random weights."""

    image_size: int = key(64, gt=0, unit="pixels", help="Height and width.")
    patch_size: int = key(8, gt=0, unit="pixels", help="Height and width of a patch, which is one token.")
    dim: int = key(128, gt=0, help="Width of a token.")
    n_layers: int = key(4, gt=0, help="Blocks.")
    n_heads: int = key(4, gt=0, help="Attention heads.")
    hidden_dim: int | None = key(None, gt=0, help="Width of the MLP.", derived="4 * dim")
    dropout: float = key(0.0, ge=0, lt=1, help="Dropped share of what attention and MLP add.")
    mean: list[float] = key(factory=lambda: [0.5, 0.5, 0.5], help="Mean of each channel, from 0 to 1.")
    std: list[float] = key(
        factory=lambda: [0.5, 0.5, 0.5], gt=0, help="Standard deviation of each channel, from 0 to 1."
    )

    def problems(self) -> Iterator[Problem]:
        if self.image_size % self.patch_size:
            yield Problem("image_size", f"{self.image_size} is no multiple of patch_size = {self.patch_size}")
        if self.dim % self.n_heads:
            yield Problem("dim", f"{self.dim} is no multiple of n_heads = {self.n_heads}")
        for name in ("mean", "std"):
            if len(getattr(self, name)) != 3:
                yield Problem(name, "needs three numbers, one a channel")

    def geometry(self) -> ImageGeometry:
        mean, std = self.mean, self.std
        return ImageGeometry(
            size=self.image_size,
            grid=self.image_size // self.patch_size,
            dim=self.dim,
            mean=(mean[0], mean[1], mean[2]),
            std=(std[0], std[1], std[2]),
            resample="bilinear",
        )


@table
class ClipOptions:
    """CLIP's vision tower (transformers), without its class token."""

    path: str | None = key(
        None,
        help="Folder of a checkpoint (Hugging Face), which then says all sizes.",
        derived="random weights",
    )
    layer: int | None = key(
        -2, help="States that are taken, counted from the last; none: the last ones after the last norm."
    )
    image_size: int = key(224, gt=0, unit="pixels", help="Height and width.")
    patch_size: int = key(32, gt=0, unit="pixels", help="Height and width of a patch.")
    dim: int = key(768, gt=0, help="Width of a token.")
    n_layers: int = key(12, gt=0, help="Blocks.")
    n_heads: int = key(12, gt=0, help="Attention heads.")
    hidden_dim: int = key(3072, gt=0, help="Width of the MLP.")

    def sizes(self) -> dict[str, Any]:
        return tower_sizes(self)

    def geometry(self) -> ImageGeometry:
        return tower_geometry(
            self,
            mean=(0.48145466, 0.4578275, 0.40821073),
            std=(0.26862954, 0.26130258, 0.27577711),
            crop=True,
        )


@table
class SiglipOptions:
    """SigLIP's vision tower (transformers)."""

    path: str | None = key(
        None,
        help="Folder of a checkpoint (Hugging Face), which then says all sizes.",
        derived="random weights",
    )
    layer: int | None = key(
        None,
        help="States that are taken, counted from the last.",
        derived="the last ones after the last norm",
    )
    image_size: int = key(224, gt=0, unit="pixels", help="Height and width.")
    patch_size: int = key(16, gt=0, unit="pixels", help="Height and width of a patch.")
    dim: int = key(768, gt=0, help="Width of a token.")
    n_layers: int = key(12, gt=0, help="Blocks.")
    n_heads: int = key(12, gt=0, help="Attention heads.")
    hidden_dim: int = key(3072, gt=0, help="Width of the MLP.")

    def sizes(self) -> dict[str, Any]:
        return tower_sizes(self)

    def geometry(self) -> ImageGeometry:
        return tower_geometry(self, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop=False)


def tower_sizes(options: Any) -> dict[str, Any]:
    """Sizes by the names of a Hugging Face configuration: those of the checkpoint, else of the options.

    Raises:
        ForgeError: no configuration in the folder, or it cannot be read.
    """
    own = {
        "hidden_size": options.dim,
        "intermediate_size": options.hidden_dim,
        "num_hidden_layers": options.n_layers,
        "num_attention_heads": options.n_heads,
        "image_size": options.image_size,
        "patch_size": options.patch_size,
    }
    if options.path is None:
        return own
    file = Path(options.path).expanduser() / "config.json"
    try:
        found = json.loads(file.read_bytes())
        found = found.get("vision_config", found)
        return own | {k: found[k] for k in (*own, "hidden_act", "layer_norm_eps") if k in found}
    except (OSError, ValueError, AttributeError) as error:
        raise ForgeError(f"cannot read the sizes of an encoder from {file}: {error}") from error


def tower_geometry(options: Any, *, mean: Triple, std: Triple, crop: bool) -> ImageGeometry:
    """Of a vision tower; statistics are those beside the checkpoint where it has them."""
    sizes = options.sizes()
    if options.path is not None:
        file = Path(options.path).expanduser() / "preprocessor_config.json"
        said = json.loads(file.read_bytes()) if file.is_file() else {}
        mean = tuple(said.get("image_mean", mean))
        std = tuple(said.get("image_std", std))
    return ImageGeometry(
        size=sizes["image_size"],
        grid=sizes["image_size"] // sizes["patch_size"],
        dim=sizes["hidden_size"],
        mean=mean,
        std=std,
        resample="bicubic",
        crop=crop,
    )


@table
class LinearOptions:
    """One matrix: a visual token becomes a token of the decoder."""

    def tokens(self, grid: int) -> int:
        return grid**2


@table
class MlpOptions:
    """Two matrices with a GELU between them (LLaVA 1.5; Liu et al. 2023)."""

    hidden_dim: int | None = key(None, gt=0, help="Width between them.", derived="model.dim")

    def tokens(self, grid: int) -> int:
        return grid**2


@table
class AveragePoolOptions:
    """The mean of each window of tokens, then one matrix."""

    window: int = key(2, gt=0, unit="tokens", help="Height and width of a window; those at the edge are cut.")

    def tokens(self, grid: int) -> int:
        across = -(-grid // self.window)
        return int(across**2)


@table
class AttentionalPoolOptions:
    """Attention in each window whose query is the window's mean, then one matrix."""

    window: int = key(2, gt=0, unit="tokens", help="Height and width of a window.")
    n_heads: int = key(4, gt=0, help="Attention heads; they divide the encoder's width.")

    def tokens(self, grid: int) -> int:
        return _divided(grid, self.window, "window") ** 2


@table
class PixelShuffleOptions:
    """Neighbouring tokens side by side in one wider token, then one matrix (Idefics 3)."""

    factor: int = key(2, gt=0, unit="tokens", help="Height and width of what becomes one token.")

    def tokens(self, grid: int) -> int:
        return _divided(grid, self.factor, "factor") ** 2


@table
class JointOptions:
    """Visual tokens stand in the sequence like text."""

    in_sequence: ClassVar[bool] = True
    bidirectional: str = key(
        "none",
        choices=("none", "image", "prefix"),
        help="Who sees later tokens, too: nobody; the tokens of an image each other; all before the first "
        "supervised token each other (prefix language model).",
    )


@table
class CrossAttentionOptions:
    """Blocks between those of the decoder in which text asks visual tokens; they start as the identity."""

    in_sequence: ClassVar[bool] = False
    every: int = key(4, gt=0, help="One such block behind every n-th block of the decoder.")
    n_heads: int | None = key(None, gt=0, help="Their attention heads.", derived="model.n_heads")


@table
class MotOptions(JointOptions):
    """Norms, projections and MLP for each modality, one attention over all."""


@table
class MomaOptions(JointOptions):
    """Experts for each modality, as many as `[moe]` says; needs forge-moe."""


def _divided(grid: int, by: int, name: str) -> int:
    if grid % by:
        raise ValueError(f"{name} = {by} does not divide its {grid} x {grid} tokens")
    return grid // by
