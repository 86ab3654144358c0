"""Names of experts, routers and latent attention in Hugging Face files."""

from __future__ import annotations

from collections.abc import Sequence

from forge_core.config.config import Config
from forge_core.config.tables import ModelConfig
from forge_core.contract import TensorRule
from forge_core.contract.architecture import rename, split, stack
from forge_core.model.architectures import decoder_rules
from forge_core.model.architectures.rules import LAYER
from forge_moe.table import MoeConfig


def expert_rules(moe: MoeConfig, part: str, names: Sequence[str], router: str) -> list[TensorRule]:
    """Rules of router and experts.

    Args:
        part: what comes before `experts.` and the router in a layer of theirs, with its dot.
        names: of an expert's gate, up and down matrices.
        router: name of the router's weight.
    """
    theirs, ours = f"model.{LAYER}{part}", f"{LAYER}mlp."
    rules = [rename(f"{theirs}{router}", f"{ours}router.weight")]
    for name, mine in zip(names, ("w_gate", "w_up", "w_down"), strict=True):
        each = f"{theirs}experts.{{expert}}.{name}.weight"
        rules.append(stack(each, f"{ours}experts.{mine}", moe.num_experts))
    width = moe.expert_hidden_dim or 0
    both = [f"{ours}experts.w_gate", f"{ours}experts.w_up"]
    # files that transformers wrote as it holds them in memory
    memory = f"model.{LAYER}mlp.experts."
    rules.append(split(f"{memory}gate_up_proj", both, (width, width), 1))
    return [*rules, rename(f"{memory}down_proj", f"{ours}experts.w_down")]


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def mixtral_rules(config: Config) -> list[TensorRule]:
    rules = expert_rules(config[MoeConfig], "block_sparse_moe.", ("w1", "w3", "w2"), "gate.weight")
    memory = rename(f"model.{LAYER}mlp.gate.weight", f"{LAYER}mlp.router.weight")
    return [*decoder_rules(config[ModelConfig], mlp=False), *rules, memory]


def qwen_rules(config: Config) -> list[TensorRule]:
    rules = expert_rules(config[MoeConfig], "mlp.", PROJECTIONS, "gate.weight")
    rules += [
        rename(f"model.{LAYER}mlp.shared_expert.{name}.weight", f"{LAYER}mlp.shared.{name}.weight")
        for name in PROJECTIONS
    ]
    gate = rename(f"model.{LAYER}mlp.shared_expert_gate.weight", f"{LAYER}mlp.shared_gate.weight")
    return [*decoder_rules(config[ModelConfig]), *rules, gate]


def deepseek_rules(config: Config) -> list[TensorRule]:
    rules = expert_rules(config[MoeConfig], "mlp.", PROJECTIONS, "gate.weight")
    rules.append(rename(f"model.{LAYER}mlp.gate.e_score_correction_bias", f"{LAYER}mlp.router.expert_bias"))
    rules += [
        rename(f"model.{LAYER}mlp.shared_experts.{name}.weight", f"{LAYER}mlp.shared.{name}.weight")
        for name in PROJECTIONS
    ]
    latent = {
        "q_a_proj": "q_a_proj",
        "q_a_layernorm": "q_a_norm",
        "q_b_proj": "q_b_proj",
        "kv_a_proj_with_mqa": "kv_a_proj",
        "kv_a_layernorm": "kv_a_norm",
        "kv_b_proj": "kv_b_proj",
    }
    rules += [
        rename(f"model.{LAYER}self_attn.{one}.{part}", f"{LAYER}attn.{other}.{part}")
        for one, other in latent.items()
        for part in ("weight", "bias")
    ]
    return [*decoder_rules(config[ModelConfig]), *rules]
