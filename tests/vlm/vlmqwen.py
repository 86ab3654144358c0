"""Tiny Qwen2-VL and Qwen2.5-VL."""

from __future__ import annotations

from typing import Any

from paritykit import SIZES

TEXT: dict[str, Any] = {
    **SIZES,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [2, 1, 1]},
}
VISION = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**VISION, "embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {
        **VISION,
        "hidden_size": 24,
        "out_hidden_size": 32,
        "intermediate_size": 40,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
}
