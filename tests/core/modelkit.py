"""Small decoders, and a decoder of plain loops to compare them with."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from forge_core.config.tables import ModelConfig
from forge_core.model import Decoder, build_decoder, default_parts, initialise
from forge_core.model.dimensions import Dimensions


def config(**changes: Any) -> ModelConfig:
    """A resolved table: width 16, 2 layers, 4 query and 2 key heads of 8, vocabulary 13, 32 positions."""
    values: dict[str, Any] = {
        "dim": 16,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 13,
        "ffn_hidden_dim": 24,
        "gated_mlp": True,
        "max_seq_len": 32,
        "init_std": 0.3,
    }
    return ModelConfig(**{**values, **changes})


def decoder(model: ModelConfig | None = None, dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    """A decoder whose norms and biases differ from 1 and 0, so that a swapped or missing one shows."""
    model = config() if model is None else model
    built = build_decoder(model, default_parts(model)).to(dtype)
    initialise(built, seed, model.init_std, model.n_layers)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return built


def tokens(rows: int, length: int, vocab_size: int = 13, seed: int = 1) -> Tensor:
    """(rows, length) int64."""
    return torch.randint(0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


class PlainDecoder:
    """The decoder written out in fp64, one row and one head at a time.

    Args:
        model: the resolved table. weights: by canonical name, (out, in) matrices.
    """

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor]) -> None:
        self.model, self.d = model, Dimensions.of(model)
        self.weights = {name: tensor.detach().double() for name, tensor in weights.items()}

    def logits(self, row: Tensor, see: Tensor | None = None, positions: list[int] | None = None) -> Tensor:
        """Logits (S, V) of one row of tokens (S,); `see` (S, S) bool replaces the causal rule."""
        length = len(row)
        see = torch.ones(length, length, dtype=torch.bool).tril() if see is None else see
        places = list(range(length)) if positions is None else positions
        x = self.weights["embed.weight"][row]
        for i in range(self.model.n_layers):
            h = self.norm(x, f"layers.{i}.attn_norm")
            x = x + self.attention(h, f"layers.{i}.attn.", see, places)
            x = x + self.mlp(self.norm(x, f"layers.{i}.mlp_norm"), f"layers.{i}.mlp.")
        head = "embed.weight" if self.model.tie_embeddings else "head.weight"
        return self.norm(x, "norm") @ self.weights[head].T

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, x: Tensor, name: str, kind: str | None = None) -> Tensor:
        if (kind or self.model.norm_type) == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        x = (
            x
            / (x.square().mean(-1, keepdim=True) + self.model.norm_eps).sqrt()
            * self.weights[f"{name}.weight"]
        )
        return x + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else x

    def turned(self, x: Tensor, places: list[int]) -> Tensor:
        """(S, head_dim) rotated by position."""
        width = x.shape[1]
        y = x.clone()
        for s, place in enumerate(places):
            for pair in range(width // 2):
                angle = place * self.model.rope_theta ** (-2 * pair / width)
                a, b = x[s, pair], x[s, pair + width // 2]
                y[s, pair] = a * math.cos(angle) - b * math.sin(angle)
                y[s, pair + width // 2] = b * math.cos(angle) + a * math.sin(angle)
        return y

    def attention(self, h: Tensor, name: str, see: Tensor, places: list[int]) -> Tensor:
        q, k, v = (self.linear(h, f"{name}{which}_proj") for which in "qkv")
        width, group = self.d.head_dim, self.d.n_heads // self.d.n_kv_heads
        heads = []
        for head in range(self.d.n_heads):
            own = slice(head * width, (head + 1) * width)
            shared = slice(head // group * width, (head // group + 1) * width)
            query, key, value = q[:, own], k[:, shared], v[:, shared]
            if self.model.qk_norm:
                query = self.norm(query, f"{name}q_norm", "rmsnorm")
                key = self.norm(key, f"{name}k_norm", "rmsnorm")
            query, key = self.turned(query, places), self.turned(key, places)
            scores = (query @ key.T / math.sqrt(width)).masked_fill(~see, -math.inf)
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            heads.append(weights @ value)
        return self.linear(torch.cat(heads, -1), f"{name}o_proj")

    def mlp(self, h: Tensor, name: str) -> Tensor:
        act = {
            "silu": lambda x: x / (1 + (-x).exp()),
            "relu": lambda x: x.clamp(min=0),
            "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
            "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
        }[self.model.activation]
        up = self.linear(h, f"{name}up_proj")
        inner = act(self.linear(h, f"{name}gate_proj")) * up if self.d.gated_mlp else act(up)
        return self.linear(inner, f"{name}down_proj")
