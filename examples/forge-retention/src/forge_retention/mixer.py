"""Retention (Sun et al. 2023, "Retentive Network"): attention with a decay instead of a softmax."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core.contract import LayerContext
from forge_core.model import mark, rotate


class State:
    """What one layer remembers while generating: (B, H, d, d), or None before the first token."""

    value: Tensor | None = None


class Retention(nn.Module):
    """Multi-scale retention with a gate (section 2.2, equations 7 and 8).

    Head h forgets at the rate gamma_h = 1 - 2 ** (-5 - h). Documents of a packed sequence see nothing of each
    other.

    Args:
        dim: D, width of the residual stream.
        heads: H. head_dim: d, width of each.
        index: number of the layer; its entry in `context.cache`.
    """

    gamma: Tensor

    def __init__(self, dim: int, heads: int, head_dim: int, index: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.index = heads, head_dim, index
        width = heads * head_dim
        self.q_proj = nn.Linear(dim, width, bias=False)
        self.k_proj = nn.Linear(dim, width, bias=False)
        self.v_proj = nn.Linear(dim, width, bias=False)
        self.gate_proj = nn.Linear(dim, width, bias=False)
        self.o_proj = mark(nn.Linear(width, dim, bias=False), init="residual")
        self.register_buffer("gamma", torch.empty(heads), persistent=False)

    def forge_reset(self, generator: Any) -> None:
        """Fill what no rule of the core fills: the decays."""
        rates = 1.0 - 2.0 ** (-5.0 - torch.arange(self.heads, dtype=torch.float64))
        self.gamma.copy_(rates)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), the residual not added."""
        shape = (*x.shape[:2], self.heads, self.head_dim)
        q, k, v = (proj(x).view(shape) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if context.cos is not None and context.sin is not None:
            q, k = rotate(q, context.cos, context.sin), rotate(k, context.cos, context.sin)
        k = k * self.head_dim**-0.5
        if context.valid is not None:
            k = k * context.valid[:, :, None, None]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        scores = q @ k.transpose(-1, -2) * self.decay(x.shape[1], context.documents).to(q.dtype)
        y = scores @ v
        if context.cache is not None:
            y = y + self.remembered(context.cache[self.index], q, k, v)
        y = F.rms_norm(y, (self.head_dim,)).transpose(1, 2).reshape(*x.shape[:2], -1)
        out: Tensor = self.o_proj(F.silu(self.gate_proj(x)) * y)
        return out

    def decay(self, length: int, documents: Tensor | None) -> Tensor:
        """gamma ** (n - m) for m <= n of one document, else 0: (H, S, S), or (B, H, S, S) with documents."""
        index = torch.arange(length, device=self.gamma.device)
        distance = index[:, None] - index
        decay = self.gamma[:, None, None] ** distance.clamp(min=0) * (distance >= 0)
        if documents is None:
            return decay
        return decay * (documents[:, None, :, None] == documents[:, None, None, :])

    def remembered(self, state: State, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What the tokens before these (B, H, S, d) give, and take these into the state (equation 6)."""
        length = q.shape[2]
        power = torch.arange(1, length + 1, device=q.device)
        gamma = self.gamma[:, None].to(q.dtype)
        fade = gamma ** (length - power)
        new = (k * fade[..., None]).transpose(-1, -2) @ v
        before, state.value = state.value, new
        if before is None:
            return torch.zeros_like(v)
        state.value = before * (gamma**length)[..., None] + new
        return (q * (gamma**power)[..., None]) @ before

    def new_cache(self, batch: int, length: int, device: Any = None, dtype: Any = None) -> State:
        """An empty state. It does not grow with the text."""
        return State()
