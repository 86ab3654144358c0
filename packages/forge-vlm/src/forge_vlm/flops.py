"""Floating-point operations of seeing, a token of text. Imports no torch."""

from __future__ import annotations

from typing import Any

from forge_core.config import Config
from forge_core.config.tables import ModelConfig, TrainConfig
from forge_core.errors import ForgeError
from forge_vlm.geometry import ImageShape, PackedGeometry, shape_of
from forge_vlm.options import (
    AttentionalPoolOptions,
    AveragePoolOptions,
    ClipOptions,
    CrossAttentionOptions,
    MlpOptions,
    VitOptions,
)
from forge_vlm.options_packed import MergerOptions, PatchesOptions
from forge_vlm.options_tiled import GatedCrossOptions, TilesOptions
from forge_vlm.table import VlmConfig

BOTH_WAYS = 3.0
"""Forward and backward over the forward alone: a backward has two products for each of the forward's."""


def flops_of_seeing(config: Config) -> float:
    """FLOPs of encoder, connector and blocks of cross attention for a position of the sequence, if each
    sequence has all its images.

    An encoder that does not train runs forward alone, and the first matrix behind it needs no gradient of its
    input. An encoder of somebody else counts what `forward_flops()` of its options says for an image, none
    without it; a connector of somebody else as one matrix.
    """
    vlm = config[VlmConfig]
    try:
        shape = shape_of(config)
    except ForgeError:
        return 0.0
    model, length = config[ModelConfig], config[TrainConfig].seq_len
    encoder = config.options("vlm.encoder", vlm.encoder.name)
    connector = config.options("vlm.connector", vlm.connector.name)
    first, rest = connector_flops(connector, shape, model.dim)
    frozen = vlm.encoder.frozen
    each = encoder_flops(encoder) * (1.0 if frozen else BOTH_WAYS)
    each += first * (2.0 if frozen else BOTH_WAYS) + rest * BOTH_WAYS
    found = each * vlm.max_images / length
    fusion = config.options("vlm", vlm.fusion)
    if isinstance(fusion, CrossAttentionOptions):
        found += BOTH_WAYS * cross_flops(model, fusion, shape.visual, length)
    if isinstance(fusion, GatedCrossOptions):
        found += BOTH_WAYS * gated_flops(model, fusion, shape.visual, length)
    return found


def encoder_flops(options: Any) -> float:
    """FLOPs of a forward of one image, a multiply-add as two; 0 where the encoder does not say."""
    if isinstance(options, VitOptions):
        tokens = (options.image_size // options.patch_size) ** 2
        hidden = options.hidden_dim or 4 * options.dim
        patches = 6.0 * tokens * options.dim * options.patch_size**2
        return patches + options.n_layers * block_flops(tokens, options.dim, 2 * options.dim * hidden)
    if isinstance(options, PatchesOptions):
        return _packed_flops(options)
    if isinstance(options, TilesOptions):
        return _tiled_flops(options)
    if hasattr(options, "image_size") and hasattr(options, "hidden_dim"):
        return _tower_flops(options)
    say = getattr(options, "forward_flops", None)
    return 0.0 if say is None else float(say())


def block_flops(tokens: int, dim: int, mlp: int, seen: int | None = None) -> float:
    """FLOPs of a forward of one block over an image's tokens, of which each sees `seen`, or all.

    Args:
        mlp: weights of its MLP.
    """
    return 2.0 * tokens * (4 * dim**2 + mlp) + 4.0 * tokens * (tokens if seen is None else seen) * dim


def _tower_flops(options: Any) -> float:
    """Of the blocks up to the one whose states are taken; CLIP's class token takes part in them."""
    tower = options.settled() if hasattr(options, "settled") else options
    layer = getattr(options, "layer", None)
    patches = (tower.image_size // tower.patch_size) ** 2
    used = tower.n_layers if layer is None else layer % (tower.n_layers + 1)
    tokens = patches + isinstance(options, ClipOptions)
    embedding = 6.0 * patches * tower.dim * tower.patch_size**2
    return float(embedding + used * block_flops(tokens, tower.dim, 2 * tower.dim * tower.hidden_dim))


def _packed_flops(options: PatchesOptions) -> float:
    """Of the largest image."""
    tokens, dim = options.geometry().patches, options.dim
    mlp = (3 if options.gated_mlp else 2) * dim * options.hidden_dim
    embedding = 6.0 * tokens * dim * options.patch_size**2 * options.frames
    near = options.window**2 or None
    full = len(options.full_layers) if near else options.n_layers
    whole = full * block_flops(tokens, dim, mlp)
    return embedding + whole + (options.n_layers - full) * block_flops(tokens, dim, mlp, near)


def _tiled_flops(options: TilesOptions) -> float:
    """Of an image of all its tiles, each with a token for the whole of it; all tokens see each other."""
    geometry, dim = options.geometry(), options.dim
    embedding = 6.0 * geometry.tiles * geometry.grid**2 * dim * options.patch_size**2
    layers = options.n_layers + options.n_global_layers
    return embedding + layers * block_flops(geometry.patches, dim, 2 * dim * options.hidden_dim)


def connector_flops(options: Any, shape: ImageShape, out: int) -> tuple[float, float]:
    """FLOPs of a forward over one image: of the matrices that see the encoder's tokens, and of the others."""
    seen, given, dim = shape.geometry.patches, shape.tokens, shape.geometry.dim
    if isinstance(options, MlpOptions):
        hidden = options.hidden_dim or out
        return 2.0 * seen * dim * hidden, 2.0 * seen * hidden * out
    if isinstance(options, AttentionalPoolOptions):
        return 2.0 * (given + 2 * seen) * dim**2, 2.0 * given * dim * out + 4.0 * seen * dim
    if isinstance(options, AveragePoolOptions):
        return 2.0 * given * dim * out, 0.0
    if isinstance(options, MergerOptions):
        wide = dim * options.side**2
        return 2.0 * given * wide**2, 2.0 * given * wide * out
    side = shape.geometry.side if isinstance(shape.geometry, PackedGeometry) else 1
    # one matrix over all that the encoder gives, side by side or not
    return 2.0 * max(seen, given * side**2) * dim * out, 0.0


def cross_flops(model: ModelConfig, options: CrossAttentionOptions, visual: int, length: int) -> float:
    """FLOPs of a forward of all blocks of cross attention, a position of the text, which sees all images."""
    dim, mlp = model.dim, (3 if model.gated_mlp else 2) * model.dim * (model.ffn_hidden_dim or 0)
    text = 2.0 * (2 * dim**2 + mlp) + 4.0 * visual * dim
    return model.n_layers // options.every * (text + 4.0 * visual * dim**2 / length)


def gated_flops(model: ModelConfig, options: GatedCrossOptions, visual: int, length: int) -> float:
    """FLOPs of a forward of all blocks that look at visual tokens in place of text, a position of the text,
    more than if they looked at text, causally."""
    width, keys = (model.head_dim or 0) * model.n_heads, (model.head_dim or 0) * (model.n_kv_heads or 0)
    projections = 4.0 * model.dim * keys * (visual / length - 1)
    return len(options.layers) * (projections + width * (4.0 * visual - 2.0 * length))
