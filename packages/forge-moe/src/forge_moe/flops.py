"""Floating-point operations of experts, by what a token uses. Imports no torch."""

from __future__ import annotations

from forge_core.config.tables import ModelConfig
from forge_moe.table import MoeConfig, expert_layers


def matrix_parameters(model: ModelConfig, moe: MoeConfig) -> int:
    """Weights of the matrices that multiply a token in one layer: router, K experts, shared ones, gate."""
    matrices = 3 if model.gated_mlp else 2
    routed = moe.top_k * matrices * model.dim * (moe.expert_hidden_dim or 0)
    shared = matrices * model.dim * (moe.shared_hidden_dim or 0) if moe.shared_experts else 0
    gate = model.dim if moe.shared_gate else 0
    return routed + shared + gate + model.dim * moe.num_experts


def flops_beyond_mlp(model: ModelConfig, moe: MoeConfig) -> float:
    """FLOPs of a token, forward and backward, more than with the MLPs that experts stand in for."""
    mlp = (3 if model.gated_mlp else 2) * model.dim * (model.ffn_hidden_dim or 0)
    layers = len(expert_layers(moe, model.n_layers))
    return 6.0 * layers * (matrix_parameters(model, moe) - mlp)
