"""Options of encoders, connectors and fusions. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import attrs

from forge_core.config import Problem, key, table
from forge_core.config.fields import evolve
from forge_core.data.wording import counted
from forge_core.errors import ForgeError
from forge_vlm.encoders.keys import RESAMPLING, read_checkpoint
from forge_vlm.geometry import ImageGeometry
from forge_vlm.geometry_split import LARGEST
from forge_vlm.statistics import CLIP_MEAN, CLIP_STD, mean_key, statistics_of, statistics_problems, std_key


@table
class VitOptions:
    """A small vision transformer of our own (Dosovitskiy et al. 2021), with random weights."""

    image_size: int = key(64, gt=0, unit="pixels", help="Height and width.")
    patch_size: int = key(8, gt=0, unit="pixels", help="Height and width of a patch, which is one token.")
    dim: int = key(128, gt=0, help="Width of a token.")
    n_layers: int = key(4, gt=0, help="Blocks.")
    n_heads: int = key(4, gt=0, help="Attention heads.")
    hidden_dim: int | None = key(None, gt=0, help="Width of the MLP.", derived="4 * dim")
    dropout: float = key(0.0, ge=0, lt=1, help="Dropped share of what attention and MLP add.", computes=False)
    mean: list[float] = mean_key()
    std: list[float] = std_key()

    def problems(self) -> Iterator[Problem]:
        if self.image_size % self.patch_size:
            yield Problem("image_size", f"{self.image_size} is no multiple of patch_size = {self.patch_size}")
        if self.dim % self.n_heads:
            yield Problem("dim", f"{self.dim} is no multiple of n_heads = {self.n_heads}")
        yield from statistics_problems(self)

    def geometry(self) -> ImageGeometry:
        return ImageGeometry(
            size=self.image_size,
            grid=self.image_size // self.patch_size,
            dim=self.dim,
            resample="bilinear",
            **statistics_of(self),
        )


_LAYER = (
    "States that are taken: after the block of this number, from the last if negative, without the last norm."
)
_LAYERS = "States of several such blocks, side by side in one wide token, in place of those of layer."
_FIT = (
    "How a picture becomes a square: both sides are resized; the shorter one is, and the middle is cut out; "
    "or it is put onto a square of the mean colour first."
)
_ACTIVATIONS = ("quick_gelu", "gelu", "gelu_tanh", "silu", "relu")
_FITS = ("stretch", "crop", "pad")


def _patch_size(pixels: int) -> Any:
    return key(pixels, gt=0, unit="pixels", help="Height and width of a patch.")


def _activation(name: str) -> Any:
    return key(name, choices=_ACTIVATIONS, help="Non-linearity of the MLP.")


def _resample(name: str) -> Any:
    return key(name, choices=RESAMPLING, help="How pictures are resized.")


@table
class TowerOptions:
    """What vision towers of transformers have in common, with SigLIP's sizes."""

    path: str | None = key(
        None,
        help="Folder of a checkpoint (Hugging Face), which then says all sizes and statistics.",
        derived="random weights",
        computes=False,
    )
    image_size: int = key(224, gt=0, unit="pixels", help="Height and width.")
    patch_size: int = _patch_size(16)
    dim: int = key(768, gt=0, help="Width of a token.")
    n_layers: int = key(12, gt=0, help="Blocks.")
    n_heads: int = key(12, gt=0, help="Attention heads.")
    hidden_dim: int = key(3072, gt=0, help="Width of the MLP.")
    activation: str = _activation("gelu_tanh")
    norm_eps: float = key(1e-6, gt=0, help="Epsilon of the norms.")
    mean: list[float] = mean_key()
    std: list[float] = std_key()
    resample: str = _resample("bicubic")

    def problems(self) -> Iterator[Problem]:
        try:
            settled = self.settled()
        except ForgeError as error:
            yield Problem("path", error.message, error.hint)
            return
        if settled.image_size < settled.patch_size:
            yield Problem(
                "patch_size", f"{settled.patch_size} is more than image_size = {settled.image_size}"
            )
        if settled.dim % settled.n_heads:
            yield Problem("dim", f"{settled.dim} is no multiple of n_heads = {settled.n_heads}")
        yield from statistics_problems(settled)
        blocks = settled.n_layers
        for name in ("layer", "layers"):
            given = getattr(settled, name, None)
            for layer in given if isinstance(given, list) else [given]:
                if layer is not None and not -blocks - 1 <= layer <= blocks:
                    yield Problem(
                        name, f"there is none of this number among {counted(blocks, 'block')}: {layer}"
                    )

    def settled(self) -> Self:
        """With what the checkpoint at `path` says in place of the keys, and without it.

        Raises:
            ForgeError: no configuration in the folder, or one that is not offered.
        """
        if self.path is None:
            return self
        names = {field.name for field in attrs.fields(type(self))}  # type: ignore[arg-type]  # a table is an attrs class
        found = {name: value for name, value in read_checkpoint(self.path).items() if name in names}
        return evolve(self, path=None, **found)

    def geometry(self) -> ImageGeometry:
        tower = self.settled()
        fit = getattr(tower, "fit", "stretch")
        return ImageGeometry(
            size=tower.image_size,
            grid=tower.image_size // tower.patch_size,
            dim=tower.dim * max(1, len(getattr(tower, "layers", ()))),
            extra=getattr(tower, "class_token", False) - getattr(tower, "drop_first", False),
            resample=tower.resample,
            **statistics_of(tower),
            crop=fit == "crop",
            pad=fit == "pad",
            longest=getattr(tower, "longest_edge", None),
            split=getattr(tower, "split", False),
        )


@table
class ClipOptions(TowerOptions):
    """CLIP's vision tower (transformers)."""

    layer: int | None = key(-2, help=_LAYER)
    layers: list[int] = key(factory=list, help=_LAYERS)
    class_token: bool = key(False, help="Keep its class token, before those of the patches.")
    patch_size: int = _patch_size(32)
    activation: str = _activation("quick_gelu")
    norm_eps: float = key(1e-5, gt=0, help="Epsilon of the norms.")
    mean: list[float] = mean_key(CLIP_MEAN)
    std: list[float] = std_key(CLIP_STD)
    fit: str = key("crop", choices=_FITS, help=_FIT)


@table
class SiglipOptions(TowerOptions):
    """SigLIP's vision tower (transformers), and SigLIP 2's of fixed resolution, without its pooling head."""

    layer: int | None = key(None, help=_LAYER, derived="the last ones after the last norm")
    layers: list[int] = key(factory=list, help=_LAYERS)
    drop_first: bool = key(
        False, help="Leave the token of the first patch out, as LLaVAs do that take it for a class token."
    )
    fit: str = key("stretch", choices=_FITS, help=_FIT)


@table
class Idefics3Options(TowerOptions):
    """The vision tower of Idefics 3 and SmolVLM (transformers): SigLIP's, with positions by their share of
    the picture."""

    patch_size: int = _patch_size(32)
    dim: int = key(1152, gt=0, help="Width of a token.")
    n_heads: int = key(16, gt=0, help="Attention heads.")
    resample: str = _resample("lanczos")
    longest_edge: int | None = key(
        None,
        gt=0,
        le=LARGEST,
        unit="pixels",
        help="Resize a picture first so that its longer side is this, as its processor does, and then both "
        "sides to image_size.",
        derived="one resize",
        computes=False,
    )
    split: bool = key(
        False,
        help="Cut a picture that is larger than image_size, once resized, into pieces of that size, each an "
        "image, with the whole behind them; [vlm.pieces] says what stands between.",
        computes=False,
    )


@table
class LinearOptions:
    """One matrix: a visual token becomes a token of the decoder."""

    side: ClassVar[int] = 1
    bias: bool = key(True, help="Add a bias.")

    def tokens(self, grid: int) -> int:
        return grid**2


@table
class MlpOptions:
    """Two matrices with a GELU between them (LLaVA 1.5; Liu et al. 2023)."""

    side: ClassVar[int] = 1
    hidden_dim: int | None = key(None, gt=0, help="Width between them.", derived="model.dim")
    activation: str = key(
        "gelu",
        choices=("gelu", "gelu_tanh", "quick_gelu", "silu", "relu"),
        help="Non-linearity between them.",
    )
    bias: bool = key(True, help="Add biases.")

    def tokens(self, grid: int) -> int:
        return grid**2


@table
class AveragePoolOptions:
    """The mean of each window of tokens, then one matrix."""

    window: int = key(2, gt=0, unit="tokens", help="Height and width of a window; those at the edge are cut.")

    @property
    def side(self) -> int:
        return self.window

    def tokens(self, grid: int) -> int:
        across = -(-grid // self.window)
        return int(across**2)


@table
class AttentionalPoolOptions:
    """Attention in each window whose query is the window's mean, then one matrix."""

    window: int = key(2, gt=0, unit="tokens", help="Height and width of a window.")
    n_heads: int = key(4, gt=0, help="Attention heads; they divide the encoder's width.")

    @property
    def side(self) -> int:
        return self.window

    def tokens(self, grid: int) -> int:
        return divided(grid, self.window, "window") ** 2


@table
class PixelShuffleOptions:
    """Neighbouring tokens side by side in one wider token, then one matrix (Idefics 3)."""

    factor: int = key(2, gt=0, unit="tokens", help="Height and width of what becomes one token.")
    bias: bool = key(False, help="Add a bias.")

    @property
    def side(self) -> int:
        return self.factor

    def tokens(self, grid: int) -> int:
        return divided(grid, self.factor, "factor") ** 2


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

    copy_text: bool = key(
        False,
        help="Let the weights for visual tokens start as copies of those for text, such as model.init_from "
        "gives them, rather than as what passes visual tokens unchanged.",
        computes=False,
    )
    positions: str = key(
        "sequence",
        choices=("sequence", "modality"),
        help="How tokens are counted for rotary positions: one after another as they stand, or text and "
        "visual tokens each on their own, both from 0.",
    )


@table
class MomaOptions(JointOptions):
    """Experts for each modality, as many as `[moe]` says; needs forge-moe."""


def divided(grid: int, by: int, name: str) -> int:
    if grid % by:
        raise ValueError(f"{name} = {by} does not divide its {grid} x {grid} tokens")
    return grid // by
