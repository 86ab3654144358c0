"""Floating-point operations of seeing, a token of text. Imports no torch."""

from __future__ import annotations

from forge_core.config import Config
from forge_core.config.tables import ModelConfig, TrainConfig
from forge_core.errors import ForgeError
from forge_vlm.geometry import shape_of
from forge_vlm.options import VitOptions
from forge_vlm.table import VlmConfig


def flops_of_seeing(config: Config) -> float:
    """FLOPs of encoder and connector for a position of the sequence, if each sequence has all its images.

    6 a weight and token where they train, 2 in an encoder that does not. An encoder that does not say its
    weights (`weights()` of its options) counts as none; pooling connectors as one matrix a visual token.
    """
    vlm = config[VlmConfig]
    try:
        shape = shape_of(config)
    except ForgeError:
        return 0.0
    options = config.options("vlm.encoder", vlm.encoder.name)
    weights = matrix_weights(options) if isinstance(options, VitOptions) else 0
    each = shape.geometry.patches * weights * (2.0 if vlm.encoder.frozen else 6.0)
    each += 6.0 * shape.tokens * shape.geometry.dim * config[ModelConfig].dim
    return each * vlm.max_images / config[TrainConfig].seq_len


def matrix_weights(options: VitOptions) -> int:
    """Weights of a vision transformer that multiply each of its tokens."""
    hidden = options.hidden_dim or 4 * options.dim
    return options.n_layers * (4 * options.dim**2 + 2 * options.dim * hidden) + 3 * options.dim * (
        options.patch_size**2
    )
