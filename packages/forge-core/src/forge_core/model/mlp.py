"""The feed-forward part of a block."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerContext, TensorPlan
from forge_core.model.dimensions import Dimensions
from forge_core.model.roles import mark


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (Hendrycks & Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
}


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020), or down(act(up(x))) with `model.gated_mlp` off."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        d = Dimensions.of(model)
        bias = model.mlp_bias
        self.activation = ACTIVATIONS[model.activation]
        self.gate_proj = nn.Linear(d.dim, d.ffn_hidden_dim, bias=bias) if d.gated_mlp else None
        self.up_proj = nn.Linear(d.dim, d.ffn_hidden_dim, bias=bias)
        self.down_proj = mark(nn.Linear(d.ffn_hidden_dim, d.dim, bias=bias), init="residual")

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), the residual not added."""
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))  # type: ignore[no-any-return]
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]

    def parallel_plan(self) -> TensorPlan:
        """Hidden units divided over tensor ranks (Shoeybi et al. 2019)."""
        column = ("up_proj",) if self.gate_proj is None else ("gate_proj", "up_proj")
        return TensorPlan(column=column, row=("down_proj",), sequence="tokens")
