"""Routers and layers of experts for tests, and plain loops to compare them with."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerContext
from forge_moe.ffn import MoeFFN
from forge_moe.routers import ExpertChoiceRouter, SigmoidRouter, SoftmaxRouter
from forge_moe.routing import Router, RouterSpec
from forge_moe.table import ExpertChoiceOptions, MoeConfig, SigmoidOptions, SoftmaxOptions

NO_LOSSES: dict[str, Any] = {"aux_loss_weight": 0.0, "router_z_loss_weight": 0.0}


def router(kind: str, experts: int, top_k: int, *, dim: int | None = None, **options: Any) -> Router:
    """A router whose logits are its input, unless `dim` says otherwise (then its weight is drawn)."""
    spec = {name: options.pop(name) for name in ("bias", "jitter", "capacity_factor") if name in options}
    width = experts if dim is None else dim
    what = RouterSpec(dim=width, num_experts=experts, top_k=top_k, **spec)
    made: Router
    if kind == "softmax":
        made = SoftmaxRouter(what, SoftmaxOptions(**options))
    elif kind == "sigmoid":
        made = SigmoidRouter(what, SigmoidOptions(**options))
    else:
        made = ExpertChoiceRouter(what, ExpertChoiceOptions(**options))
    with torch.no_grad():
        made.weight.copy_(torch.eye(experts)) if dim is None else made.weight.normal_()
        if made.expert_bias is not None:
            made.expert_bias.zero_()
    return made


def layer(
    kind: str = "softmax",
    *,
    dim: int = 8,
    hidden: int = 12,
    dtype: torch.dtype = torch.float64,
    options: dict[str, Any] | None = None,
    seed: int = 0,
    bias: bool = False,
    biased: bool = False,
    **moe: Any,
) -> MoeFFN:
    """A layer with random weights; 4 experts of which a token uses 2, unless `moe` says otherwise.

    Args:
        bias: of the router, with which experts are chosen. biased: experts have biases.
    """
    table = MoeConfig(
        **{"num_experts": 4, "top_k": 2, "expert_hidden_dim": hidden, "bias_rate": 0.0, **NO_LOSSES, **moe}
    )
    model = ModelConfig(
        dim=dim,
        n_layers=2,
        n_heads=2,
        n_kv_heads=2,
        head_dim=dim // 2,
        vocab_size=13,
        ffn_hidden_dim=hidden,
        gated_mlp=True,
        mlp_bias=biased,
        max_seq_len=32,
    )
    made = router(
        kind,
        table.num_experts,
        table.top_k,
        dim=dim,
        bias=bias,
        jitter=table.jitter,
        capacity_factor=table.capacity_factor,
        **(options or {}),
    )
    ffn = MoeFFN(model, table, made).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in ffn.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.4)
        for buffer in ffn.buffers():
            buffer.zero_()
        if ffn.experts.scale is not None:
            ffn.experts.scale.fill_(1.0)
    return ffn


def context(valid: Tensor | None = None) -> LayerContext:
    return LayerContext(valid=valid)


def log(*numbers: float) -> Tensor:
    """(1, E) logits whose softmax is the numbers over their sum."""
    return torch.tensor([[math.log(n) for n in numbers]])


def expert(ffn: MoeFFN, index: int, x: Tensor) -> Tensor:
    """One expert as three products."""
    e = ffn.experts
    assert e.w_gate is not None
    gate, up = x @ e.w_gate[index].T, x @ e.w_up[index].T
    if e.b_gate is None or e.b_up is None or e.b_down is None:
        return (F.silu(gate) * up) @ e.w_down[index].T
    hidden = F.silu(gate + e.b_gate[index]) * (up + e.b_up[index])
    return hidden @ e.w_down[index].T + e.b_down[index]


def plain(ffn: MoeFFN, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """x (B, S, D) by a loop over tokens and their experts; chosen (T, K), weights (T, K)."""
    rows = []
    for token, (experts, shares) in enumerate(zip(chosen.tolist(), weights, strict=True)):
        flat = x.reshape(-1, x.shape[-1])[token]
        total = torch.zeros_like(flat)
        for index, share in zip(experts, shares, strict=True):
            if index < ffn.moe.num_experts:
                total = total + share * expert(ffn, index, flat)
        rows.append(total)
    return torch.stack(rows).view(x.shape)
