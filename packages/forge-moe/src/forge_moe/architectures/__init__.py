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
    )


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
