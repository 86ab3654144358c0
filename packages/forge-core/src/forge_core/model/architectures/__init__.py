"""Hugging Face's dense text families, as `forge_architectures` of the core gives them. Imports no torch."""

from forge_core.model.architectures.families import ARCHITECTURES
from forge_core.model.architectures.ids import free_ids, is_free_byte_id, special_id
from forge_core.model.architectures.rope import read_rope, write_rope
from forge_core.model.architectures.rules import decoder_rules
from forge_core.model.architectures.table import (
    common_config,
    common_keys,
    differences,
    faithful,
    given,
    layer_types,
)

__all__ = [
    "ARCHITECTURES",
    "common_config",
    "common_keys",
    "decoder_rules",
    "differences",
    "faithful",
    "free_ids",
    "given",
    "is_free_byte_id",
    "layer_types",
    "read_rope",
    "special_id",
    "write_rope",
]
