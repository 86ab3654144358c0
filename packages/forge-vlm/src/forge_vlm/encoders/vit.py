"""A small vision transformer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core.model import copy_full_into, mark
from forge_vlm.options import VitOptions


class VisionBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); every token sees every other of its image."""

    def __init__(self, dim: int, n_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attn_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv_proj, self.o_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up_proj, self.down_proj = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, D) -> (N, T, D)."""
        q, k, v = self.qkv_proj(self.attn_norm(x)).unflatten(-1, (3, self.n_heads, -1)).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.dropout(self.o_proj(y.transpose(1, 2).flatten(2)))
        hidden = F.gelu(self.up_proj(self.mlp_norm(x)))
        result: Tensor = x + self.dropout(self.down_proj(hidden))
        return result


class VisionTransformer(nn.Module):
    """Patches, learnt positions, blocks and a last norm (Dosovitskiy et al. 2021), without a class token."""

    def __init__(self, options: VitOptions) -> None:
        super().__init__()
        g, p = options.geometry(), options.patch_size
        self.patches = nn.Conv2d(3, g.dim, p, stride=p)
        self.positions = nn.Parameter(torch.empty(1, g.grid**2, g.dim))
        hidden = options.hidden_dim or 4 * g.dim
        blocks = (
            VisionBlock(g.dim, options.n_heads, hidden, options.dropout) for _ in range(options.n_layers)
        )
        self.blocks = nn.ModuleList(blocks)
        self.last_norm = nn.LayerNorm(g.dim)
        mark(self, "positions", role="other")

    def forge_reset(self, generator: Any) -> None:
        """Positions start from normal(0, 0.02)."""
        full = torch.empty(self.positions.shape, device="cpu")
        copy_full_into(self.positions, full.normal_(0.0, 0.02, generator=generator("positions")))

    def forward(self, pixels: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, T, D), rows of the image first."""
        x = self.patches(pixels).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last_norm(x)
        return result
