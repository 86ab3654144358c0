"""Tiny Qwen2-VL and Qwen2.5-VL, and the logits of both sides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TEXT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [2, 1, 1]},
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
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


@torch.no_grad()
def logits_of(session: Any, batch: dict[str, Tensor], *, text: bool = False) -> Tensor:
    from forge_vlm.model import IMAGE_KEYS

    images = None if text else {name: batch[name] for name in IMAGE_KEYS if name in batch}
    whole = {name: batch[name] for name in ("positions", "documents", "valid")}
    model = session.model
    logits: Tensor = model.logits(model(batch["tokens"], images=images, apart=True, **whole))
    return logits


@torch.no_grad()
def logits_of_theirs(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits


def assert_close(one: Tensor, other: Tensor) -> None:
    scale = float(other.abs().max())
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * max(scale, 1.0))
    assert scale > 0.5, "logits near zero would agree whatever the model"
