"""A vision transformer that sees an image in tiles (Llama 3.2 Vision)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core.model import copy_full_into, mark
from forge_vlm.activations import ACTIVATIONS
from forge_vlm.options_tiled import TilesOptions

EPS = 1e-5
UNIT = 8
"""The tokens of a tile are filled up to a multiple of this."""


class TileBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with gates, times the tanh of each."""

    def __init__(self, options: TilesOptions, gated: bool) -> None:
        super().__init__()
        dim, hidden = options.dim, options.hidden_dim
        self.n_heads = options.n_heads
        self.attn_norm = nn.LayerNorm(dim, eps=options.norm_eps)
        self.mlp_norm = nn.LayerNorm(dim, eps=options.norm_eps)
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up_proj, self.down_proj = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.activation = ACTIVATIONS[options.activation]
        self.gated = gated
        if gated:
            for name in ("attn_gate", "mlp_gate"):
                self.register_parameter(name, nn.Parameter(torch.empty(1)))
                mark(self, name, role="other", init="normal")

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(N, L, D) -> (N, L, D); `mask` (N, 1, L, L) bool is True where a token is seen."""
        y = self.attn_norm(x)
        q, k, v = (
            proj(y).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self._added(x, self.o_proj(y.transpose(1, 2).flatten(2)), "attn_gate")
        hidden = self.activation(self.up_proj(self.mlp_norm(x)))
        return self._added(x, self.down_proj(hidden), "mlp_gate")

    def _added(self, x: Tensor, y: Tensor, gate: str) -> Tensor:
        return x + (getattr(self, gate).tanh() * y if self.gated else y)


class TilePlaces(nn.Module):
    """A vector for each tile of each arrangement, times the tanh of a gate."""

    def __init__(self, arrangements: int, tiles: int, dim: int) -> None:
        super().__init__()
        self.tiles = tiles
        self.embedding = nn.Embedding(arrangements + 1, tiles * dim)
        self.gate = nn.Parameter(torch.empty(1))
        mark(self, "gate", role="other", init="zeros")

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        """(N, T, P, D), `numbers` (N,) of the arrangements -> (N, T, P, D)."""
        places: Tensor = self.embedding(numbers).unflatten(-1, (self.tiles, 1, -1))
        return x + places * self.gate.tanh()


class TileTransformer(nn.Module):
    """Tiles to tokens; all tiles of an image see each other.

    A token of a tile that is not there, or one that fills up, sees only those that are; those that are see
    all, as the models were trained.
    """

    def __init__(self, options: TilesOptions) -> None:
        super().__init__()
        g, dim = options.geometry(), options.dim
        self.geometry, self.taken = g, tuple(options.taken)
        self.patches = nn.Conv2d(3, dim, options.patch_size, stride=options.patch_size, bias=False)
        self.class_token = nn.Parameter(torch.empty(dim))
        self.positions = nn.Parameter(torch.empty(g.each, dim))
        self.position_gate = nn.Parameter(torch.empty(1))
        numbers = len(g.arrangements)
        self.tile_positions = nn.Embedding(numbers + 1, g.tiles * g.each * dim)
        self.before, self.behind = (TilePlaces(numbers, g.tiles, dim) for _ in range(2))
        self.first_norm, self.last_norm = nn.LayerNorm(dim, eps=EPS), nn.LayerNorm(dim, eps=EPS)
        self.blocks = nn.ModuleList(TileBlock(options, gated=False) for _ in range(options.n_layers))
        self.global_blocks = nn.ModuleList(
            TileBlock(options, gated=True) for _ in range(options.n_global_layers)
        )
        mark(self, "class_token", role="other")
        mark(self, "positions", role="other")
        mark(self, "position_gate", role="other", init="zeros")

    def forge_reset(self, generator: Any) -> None:
        """The token of a tile and places inside it start from normal(0, 0.02)."""
        for name in ("class_token", "positions"):
            parameter = getattr(self, name)
            full = torch.empty(parameter.shape, device="cpu")
            copy_full_into(parameter, full.normal_(0.0, 0.02, generator=generator(name)))

    def forward(self, tiles: Tensor, grids: Tensor) -> Tensor:
        """Tiles (N, T, 3, size, size), 0 where there is none, and how many an image has along height and
        width, (N, 2) -> (N, T * (patches + 1), out_dim)."""
        count, most = tiles.shape[:2]
        numbers = self._numbers(grids)
        x = self.patches(tiles.flatten(0, 1)).flatten(2).transpose(1, 2).unflatten(0, (count, most))
        x = self.before(x, numbers)
        x = torch.cat((self.class_token.expand(count, most, 1, -1).to(x.dtype), x), 2)
        gate = self.position_gate.tanh()
        places = self.tile_positions(numbers).unflatten(-1, (most, self.geometry.each, -1))
        x = self.first_norm(x + (1 - gate) * self.positions + gate * places)
        x = F.pad(x, (0, 0, 0, -x.shape[2] % UNIT))
        mask, room = self._mask(grids, x.shape[2]), x.shape[2]
        x = x.flatten(1, 2)
        taken: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks):
            x = block(x, mask)
            if number in self.taken:
                taken[number] = x
        x = self.behind(self.last_norm(x).unflatten(1, (most, room)), numbers).flatten(1, 2)
        for block in self.global_blocks:
            x = block(x, mask)
        # states of one channel stand together
        between = (
            torch.stack([taken[number] for number in self.taken], -1).flatten(2) if taken else x[..., :0]
        )
        found = torch.cat((x, between), -1).view(count, most, room, -1)
        tokens: Tensor = found[:, :, : self.geometry.each].flatten(1, 2)
        return tokens

    def _numbers(self, grids: Tensor) -> Tensor:
        """Numbers of the arrangements (N, 2), 0 where there is no image."""
        most = self.geometry.tiles
        # worked out on the device: a table from the host would have to wait for it
        columns_of = most // torch.arange(1, most + 1, device=grids.device)
        before = columns_of.cumsum(0) - columns_of
        rows, columns = grids.unbind(-1)
        return torch.where(rows > 0, before[(rows - 1).clamp(min=0)] + columns, 0)

    def _mask(self, grids: Tensor, room: int) -> Tensor:
        """(N, 1, T * room, T * room), False where neither of two tokens stands for something."""
        most, each = self.geometry.tiles, self.geometry.each
        # the first tile always counts, or nothing would
        tiles = torch.arange(most, device=grids.device) < grids.prod(-1, keepdim=True).clamp(min=1)
        tokens = tiles[:, :, None] & (torch.arange(room, device=grids.device) < each)
        there = tokens.flatten(1)
        return (there[:, :, None] | there[:, None, :])[:, None]
