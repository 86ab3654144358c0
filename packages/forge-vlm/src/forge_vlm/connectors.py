"""From the tokens of an encoder to tokens of the decoder."""

from __future__ import annotations

import attrs
import torch.nn.functional as F
from torch import Tensor, nn

from forge_vlm.activations import ACTIVATIONS
from forge_vlm.options import (
    AttentionalPoolOptions,
    AveragePoolOptions,
    LinearOptions,
    MlpOptions,
    PixelShuffleOptions,
)


@attrs.frozen(kw_only=True)
class ConnectorSpec:
    """What a connector stands between.

    Attributes:
        in_dim, out_dim: widths of the encoder's tokens and of the decoder's.
        grid: tokens of the encoder along each side of an image; 0 where images have sizes of their own, whose
            patches stand in squares of the connector's `side` one after another.
    """

    in_dim: int
    out_dim: int
    grid: int


class LinearConnector(nn.Module):
    """(N, T, D_in) -> (N, T, D_out)."""

    def __init__(self, spec: ConnectorSpec, options: LinearOptions) -> None:
        super().__init__()
        self.proj = nn.Linear(spec.in_dim, spec.out_dim, bias=options.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(x)
        return y


class MlpConnector(nn.Module):
    """(N, T, D_in) -> (N, T, D_out)."""

    def __init__(self, spec: ConnectorSpec, options: MlpOptions) -> None:
        super().__init__()
        hidden = options.hidden_dim or spec.out_dim
        self.up_proj = nn.Linear(spec.in_dim, hidden, bias=options.bias)
        self.down_proj = nn.Linear(hidden, spec.out_dim, bias=options.bias)
        self.activation = ACTIVATIONS[options.activation]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.activation(self.up_proj(x)))
        return y


class AveragePool(nn.Module):
    """(N, g * g, D_in) -> (N, ceil(g / w) ** 2, D_out); windows at the edge are means of what is there.

    Of images in sizes of their own (B, P, D_in) -> (B, P / w ** 2, D_out), as the others below.
    """

    def __init__(self, spec: ConnectorSpec, options: AveragePoolOptions) -> None:
        super().__init__()
        self.grid, self.window = spec.grid, options.window
        self.proj = nn.Linear(spec.in_dim, spec.out_dim)

    def forward(self, x: Tensor) -> Tensor:
        if not self.grid:
            mean: Tensor = self.proj(windows_of(x, 0, self.window).mean(2))
            return mean
        square = x.transpose(1, 2).reshape(len(x), -1, self.grid, self.grid)
        pooled = F.avg_pool2d(square, self.window, ceil_mode=True, count_include_pad=False)
        y: Tensor = self.proj(pooled.flatten(2).transpose(1, 2))
        return y


class AttentionalPool(nn.Module):
    """(N, g * g, D_in) -> (N, (g / w) ** 2, D_out): the mean of a window asks its tokens."""

    def __init__(self, spec: ConnectorSpec, options: AttentionalPoolOptions) -> None:
        super().__init__()
        self.grid, self.window, self.n_heads = spec.grid, options.window, options.n_heads
        if spec.in_dim % self.n_heads:
            raise ValueError(f"n_heads = {self.n_heads} does not divide the encoder's width {spec.in_dim}")
        self.q_proj = nn.Linear(spec.in_dim, spec.in_dim)
        self.k_proj = nn.Linear(spec.in_dim, spec.in_dim)
        self.v_proj = nn.Linear(spec.in_dim, spec.in_dim)
        self.proj = nn.Linear(spec.in_dim, spec.out_dim)

    def forward(self, x: Tensor) -> Tensor:
        windows = windows_of(x, self.grid, self.window)
        asked = windows.mean(2, keepdim=True)
        q, k, v = self.q_proj(asked), self.k_proj(windows), self.v_proj(windows)
        q, k, v = (t.view(*t.shape[:3], self.n_heads, -1).transpose(2, 3) for t in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v)
        y: Tensor = self.proj(seen.transpose(2, 3).flatten(2))
        return y


class PixelShuffle(nn.Module):
    """(N, g * g, D_in) -> (N, (g / f) ** 2, D_out) through (N, (g / f) ** 2, f * f * D_in)."""

    def __init__(self, spec: ConnectorSpec, options: PixelShuffleOptions) -> None:
        super().__init__()
        self.grid, self.factor = spec.grid, options.factor
        self.proj = nn.Linear(spec.in_dim * options.factor**2, spec.out_dim, bias=options.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(windows_of(x, self.grid, self.factor).flatten(2))
        return y


def windows_of(x: Tensor, grid: int, side: int) -> Tensor:
    """(N, g * g, D) -> (N, (g / s) ** 2, s * s, D): tokens by window, rows of windows first; with a grid of 0
    they stand by window already."""
    if not grid:
        return x.reshape(len(x), -1, side**2, x.shape[-1])
    across = grid // side
    rows = x.reshape(len(x), across, side, across, side, x.shape[-1])
    return rows.transpose(2, 3).reshape(len(x), across**2, side**2, x.shape[-1])
