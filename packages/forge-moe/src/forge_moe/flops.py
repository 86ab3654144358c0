"""Floating-point operations of experts, by what a token uses. Imports no torch."""

from __future__ import annotations

from forge_core.config.tables import ModelConfig
from forge_moe.table import MlaConfig, MoeConfig, expert_layers, experts_per_token


def matrix_parameters(model: ModelConfig, moe: MoeConfig) -> float:
    """Weights of the matrices that multiply a token in one layer: router, its experts, shared ones, gate."""
    matrices = 3 if model.gated_mlp else 2
    routed = experts_per_token(moe) * matrices * model.dim * (moe.expert_hidden_dim or 0)
    shared = matrices * model.dim * (moe.shared_hidden_dim or 0) if moe.shared_experts else 0
    gate = model.dim if moe.shared_gate else 0
    return routed + shared + gate + model.dim * moe.num_experts


def flops_beyond_mlp(model: ModelConfig, moe: MoeConfig) -> float:
    """FLOPs of a token, forward and backward, more than with the MLPs that experts stand in for."""
    mlp = (3 if model.gated_mlp else 2) * model.dim * (model.ffn_hidden_dim or 0)
    layers = len(expert_layers(moe, model.n_layers))
    return 6.0 * layers * (matrix_parameters(model, moe) - mlp)


def flops_beyond_attention(model: ModelConfig, mla: MlaConfig, seq_len: int) -> float:
    """FLOPs of a token, forward and backward, more than with the ordinary attention that was counted.

    Scores and their sums take 12 * heads * width * seq_len of ordinary attention, of which the causal rule
    needs half; here half of that is for the width of keys, half for that of values.
    """
    if not mla.kv_rank:
        return 0.0
    heads, rope, keys = model.n_heads, model.head_dim or 0, model.n_kv_heads or 0
    query = heads * (mla.nope_dim + rope)
    weights = mla.q_rank * (model.dim + query) if mla.q_rank else model.dim * query
    weights += model.dim * (mla.kv_rank + rope) + mla.kv_rank * heads * (mla.nope_dim + mla.v_dim)
    weights += heads * mla.v_dim * model.dim
    ordinary = model.dim * rope * (2 * heads + 2 * keys)
    wider = (mla.nope_dim + rope + mla.v_dim) / 2 - rope
    return model.n_layers * (6.0 * (weights - ordinary) + 6.0 * heads * wider * seq_len)
