"""What configurations of dense families leave out inside those of others: defaults of their classes."""

from __future__ import annotations

from typing import Any

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_GEMMA = {"vocab_size": 256000, "max_position_embeddings": 8192, "head_dim": 256}
_GEMMA_2 = {
    **_GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_QWEN = {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_OLMO = {**_LLAMA, "vocab_size": 50304}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "gemma": {
        **_GEMMA,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "gemma2": _GEMMA_2,
    "gemma3_text": {**_GEMMA_2, "vocab_size": 262208, "max_position_embeddings": 131072},
    "olmo2": _OLMO,
    "olmo3": _OLMO,
}
"""By `model_type`."""
