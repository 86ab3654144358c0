"""Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE and DeepSeek-V3, as `forge_architectures` gives them. No torch here.

Defaults are those of the family's configuration class: files leave out what equals them.
"""

from __future__ import annotations

from typing import Any

from forge_core.contract import Architecture
from forge_core.model.architectures.rules import IGNORED
from forge_moe.architectures import reading, rules, writing


def _sparse(name: str, class_name: str, read: Any, write: Any, tensors: Any) -> Architecture:
    return Architecture(
        class_name=class_name,
        read=read,
        write=writing.faithful(name, write, read),
        rules=tensors,
        ignored=IGNORED,
        text=True,
        defaults=DEFAULTS[name],
    )


_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 131072,
    },
    "qwen2_moe": _QWEN,
    "qwen3_moe": {**_QWEN, "intermediate_size": 6144, "num_attention_heads": 32},
    "olmoe": {
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
    },
    "deepseek_v3": {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
    },
}
"""What configurations inside those of others leave out."""


ARCHITECTURES: dict[str, Architecture] = {
    name: _sparse(name, class_name, read, write, tensors)
    for name, class_name, read, write, tensors in (
        ("mixtral", "MixtralForCausalLM", reading.read_mixtral, writing.write_mixtral, rules.mixtral_rules),
        ("qwen3_moe", "Qwen3MoeForCausalLM", reading.read_qwen3, writing.write_qwen3, rules.qwen_rules),
        ("olmoe", "OlmoeForCausalLM", reading.read_olmoe, writing.write_olmoe, rules.qwen_rules),
        ("qwen2_moe", "Qwen2MoeForCausalLM", reading.read_qwen2, writing.write_qwen2, rules.qwen_rules),
        (
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            reading.read_deepseek,
            writing.write_deepseek,
            rules.deepseek_rules,
        ),
    )
}
"""By `model_type`; an export that is told none takes the first that has words for the model."""
