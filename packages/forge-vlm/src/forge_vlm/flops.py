"""Floating-point operations of seeing, by what there is of images. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge_core.config import Config
from forge_core.config.tables import ModelConfig, TrainConfig
from forge_core.contract import Flops
from forge_core.errors import ForgeError
from forge_core.model.flops import matrix_parameters_per_token
from forge_vlm.geometry import ImageShape, PackedGeometry, shape_of
from forge_vlm.options import (
    AttentionalPoolOptions,
    AveragePoolOptions,
    ClipOptions,
    CrossAttentionOptions,
    MlpOptions,
    MotOptions,
    TowerOptions,
    VitOptions,
)
from forge_vlm.options_packed import MergerOptions, PatchesOptions
from forge_vlm.options_tiled import GatedCrossOptions, TilesOptions
from forge_vlm.table import VlmConfig

BOTH_WAYS = 3.0
"""Forward and backward over the forward alone: a backward has two products for each of the forward's."""


def flops_of_seeing(config: Config, trains: Callable[[str], bool]) -> Flops:
    """FLOPs of encoder, connector and blocks in which text looks at images, by what there is of images.

    An encoder that does not train runs forward alone, and the first matrix behind it needs no gradient of its
    input. An encoder of somebody else counts what `forward_flops()` of its options says for an image, none
    without it; a connector of somebody else as one matrix.

    Args:
        trains: of the hook.
    """
    vlm = config[VlmConfig]
    try:
        shape = shape_of(config)
    except ForgeError:
        return Flops()
    model, length = config[ModelConfig], config[TrainConfig].seq_len
    seen, connected = trains("encoder"), trains("connector")
    first, rest = connector_flops(config.options("vlm.connector", vlm.connector.name), shape, model.dim)
    # forward, the weights' gradient, and the input's where something before it trains
    behind = first * (1.0 + connected + seen) + rest * (1.0 + connected + (connected or seen))
    encoder = config.options("vlm.encoder", vlm.encoder.name)
    ways = BOTH_WAYS if seen else 1.0
    parts = {name: ways * each for name, each in _by_piece(encoder, shape).items()}
    piece, count = piece_of(shape)
    parts[piece] = parts.get(piece, 0.0) + behind / count
    token, visual, pair = _looking_flops(config, length)
    if visual or pair:
        parts[piece] += visual * shape.tokens / count
        parts["looked_at"] = pair
    of_token, of_visual = _spared_twice(config, trains)
    if of_visual or of_token:
        parts["visual_tokens"] = of_visual
    return Flops(token=token + of_token, counted=parts, most=_most(shape, length, encoder))


def _spared_twice(config: Config, trains: Callable[[str], bool]) -> tuple[float, float]:
    """FLOPs of a token, and of a visual token, that the core spares too often where weights of one modality
    are frozen: it takes each matrix of a block to multiply every token. Of blocks without experts."""
    if not isinstance(config.options("vlm", config[VlmConfig].fusion), MotOptions) or "moe" in config:
        return 0.0, 0.0
    model = config[ModelConfig]
    weights = matrix_parameters_per_token(model) - model.dim * (model.vocab_size or 0)
    text, image = (not trains(f"decoder.layers.*.attn.{name}.*") for name in ("q_proj", "image"))
    return 2.0 * weights * image, 2.0 * weights * (text - image)


def piece_of(shape: ImageShape) -> tuple[str, int]:
    """What images are counted by, and how many of it an image has, at most."""
    return ("images", 1) if shape.geometry.kind == "square" else ("patches", shape.geometry.patches)


def _by_piece(options: Any, shape: ImageShape) -> dict[str, float]:
    """FLOPs of a forward of the encoder, by the names of counts."""
    if isinstance(options, PatchesOptions):
        return _packed_flops(options)
    if isinstance(options, TilesOptions):
        return _tiled_flops(options)
    return {"images": encoder_flops(options)}


def _most(shape: ImageShape, length: int, encoder: Any) -> dict[str, float]:
    """What a token has of all that is counted, if every sequence has all its images."""
    geometry = shape.geometry
    patches = shape.patches or shape.most * geometry.patches
    near = getattr(encoder, "window", 0) ** 2
    return {
        "images": shape.most / length,
        "patches": patches / length,
        "patch_pairs": patches * geometry.patches / length,
        "window_pairs": patches * near / length,
        "looked_at": float(shape.visual),
        "visual_tokens": shape.places and shape.visual / length,
    }


def _looking_flops(config: Config, length: int) -> tuple[float, float, float]:
    """FLOPs, both ways, of blocks in which text looks at images: of a token of text, a visual token, and a
    pair of them."""
    model, fusion = config[ModelConfig], config.options("vlm", config[VlmConfig].fusion)
    dim, width = model.dim, (model.head_dim or 0) * model.n_heads
    if isinstance(fusion, CrossAttentionOptions):
        mlp = (3 if model.gated_mlp else 2) * dim * (model.ffn_hidden_dim or 0)
        found = (2.0 * (2 * dim**2 + mlp), 4.0 * dim**2, 4.0 * dim)
        blocks = model.n_layers // fusion.every
    elif isinstance(fusion, GatedCrossOptions):
        # in place of projections of text and of its scores, causally, which the decoder has counted
        keys = 4.0 * dim * (model.head_dim or 0) * (model.n_kv_heads or 0)
        found = (-keys - 2.0 * width * length, keys, 4.0 * width)
        blocks = len(fusion.layers)
    else:
        return 0.0, 0.0, 0.0
    token, visual, pair = (BOTH_WAYS * blocks * each for each in found)
    return token, visual, pair


def encoder_flops(options: Any) -> float:
    """FLOPs of a forward of one image, a multiply-add as two; 0 where the encoder does not say."""
    if isinstance(options, VitOptions):
        tokens = (options.image_size // options.patch_size) ** 2
        hidden = options.hidden_dim or 4 * options.dim
        patches = 6.0 * tokens * options.dim * options.patch_size**2
        return patches + options.n_layers * block_flops(tokens, options.dim, 2 * options.dim * hidden)
    if isinstance(options, PatchesOptions | TilesOptions):
        return _of_the_largest(options)
    if isinstance(options, TowerOptions):
        return _tower_flops(options)
    say = getattr(options, "forward_flops", None)
    return 0.0 if say is None else float(say())


def block_flops(tokens: int, dim: int, mlp: int) -> float:
    """FLOPs of a forward of one block over an image's tokens, which all see each other.

    Args:
        mlp: weights of its MLP.
    """
    return 2.0 * tokens * (4 * dim**2 + mlp) + 4.0 * tokens**2 * dim


def _tower_flops(options: TowerOptions) -> float:
    """Of the blocks up to the one whose states are taken; CLIP's class token takes part in them."""
    tower = options.settled()
    layer = getattr(options, "layer", None)
    patches = (tower.image_size // tower.patch_size) ** 2
    layers = getattr(options, "layers", None) or [layer]
    used = max(tower.n_layers if each is None else each % (tower.n_layers + 1) for each in layers)
    tokens = patches + isinstance(options, ClipOptions)
    embedding = 6.0 * patches * tower.dim * tower.patch_size**2
    return float(embedding + used * block_flops(tokens, tower.dim, 2 * tower.dim * tower.hidden_dim))


def _of_the_largest(options: PatchesOptions | TilesOptions) -> float:
    """Of the largest image."""
    packed = isinstance(options, PatchesOptions)
    by, tokens = (_packed_flops(options) if packed else _tiled_flops(options)), options.geometry().patches  # type: ignore[arg-type]
    near = getattr(options, "window", 0) ** 2
    return tokens * (by["patches"] + by["patch_pairs"] * tokens + by.get("window_pairs", 0.0) * near)


def _packed_flops(options: PatchesOptions) -> dict[str, float]:
    """Of a patch, and of a pair of them that see each other."""
    dim = options.dim
    mlp = (3 if options.gated_mlp else 2) * dim * options.hidden_dim
    embedding = 6.0 * dim * options.patch_size**2 * options.frames
    full = len(options.full_layers) if options.window else options.n_layers
    found = {
        "patches": embedding + options.n_layers * 2.0 * (4 * dim**2 + mlp),
        "patch_pairs": full * 4.0 * dim,
    }
    return found | ({"window_pairs": (options.n_layers - full) * 4.0 * dim} if options.window else {})


def _tiled_flops(options: TilesOptions) -> dict[str, float]:
    """Of a patch of a tile, or the token for the whole of it; all of an image see each other."""
    geometry, dim, layers = options.geometry(), options.dim, options.n_layers + options.n_global_layers
    embedding = 6.0 * dim * options.patch_size**2 * geometry.grid**2 / geometry.each
    return {
        "patches": embedding + layers * 2.0 * (4 * dim**2 + 2 * dim * options.hidden_dim),
        "patch_pairs": layers * 4.0 * dim,
    }


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
