"""The dense decoder. Names are imported on first use: `forge_core.model.flops` must not bring torch along."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_core.model.attention import Attention
    from forge_core.model.block import Block
    from forge_core.model.cache import DecoderCache, KVCache
    from forge_core.model.decoder import Decoder, build_decoder
    from forge_core.model.flops import flops_per_token, matrix_parameters_per_token
    from forge_core.model.init import copy_full_into, initialise
    from forge_core.model.kernels import attend
    from forge_core.model.memory import materialise
    from forge_core.model.mlp import MLP
    from forge_core.model.norm import LayerNorm, RMSNorm, build_norm
    from forge_core.model.parts import LayerParts, default_parts
    from forge_core.model.roles import mark, parameter_roles
    from forge_core.model.rope import RotaryTable, rotate

_MODULE_OF = {
    "Attention": "attention",
    "Block": "block",
    "Decoder": "decoder",
    "DecoderCache": "cache",
    "KVCache": "cache",
    "LayerNorm": "norm",
    "LayerParts": "parts",
    "MLP": "mlp",
    "RMSNorm": "norm",
    "RotaryTable": "rope",
    "attend": "kernels",
    "build_decoder": "decoder",
    "build_norm": "norm",
    "copy_full_into": "init",
    "default_parts": "parts",
    "flops_per_token": "flops",
    "initialise": "init",
    "mark": "roles",
    "materialise": "memory",
    "matrix_parameters_per_token": "flops",
    "parameter_roles": "roles",
    "rotate": "rope",
}

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "Decoder",
    "DecoderCache",
    "KVCache",
    "LayerNorm",
    "LayerParts",
    "RMSNorm",
    "RotaryTable",
    "attend",
    "build_decoder",
    "build_norm",
    "copy_full_into",
    "default_parts",
    "flops_per_token",
    "initialise",
    "mark",
    "materialise",
    "matrix_parameters_per_token",
    "parameter_roles",
    "rotate",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
