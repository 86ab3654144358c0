"""A vision transformer for images in sizes of their own (Qwen2-VL and Qwen2.5-VL)."""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core.model.norm import LayerNorm, RMSNorm
from forge_core.model.rope import rotate
from forge_vlm.activations import ACTIVATIONS
from forge_vlm.connectors import ConnectorSpec, windows_of
from forge_vlm.encoders.packed import PatchLayout, Segments, windows
from forge_vlm.options_packed import MergerOptions, PatchesOptions

EPS = 1e-6
THETA = 10_000.0


def build_norm(kind: str, width: int) -> nn.Module:
    return RMSNorm(width, EPS) if kind == "rmsnorm" else LayerNorm(width, EPS)


@attrs.frozen
class Seen:
    """What all blocks share: tables of the patches' places, (B, P, 1, head_dim), and who sees whom."""

    cos: Tensor
    sin: Tensor
    segments: Segments


class PatchBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), over patches."""

    def __init__(self, options: PatchesOptions) -> None:
        super().__init__()
        dim, hidden = options.dim, options.hidden_dim
        self.n_heads = options.n_heads
        self.attn_norm, self.mlp_norm = build_norm(options.norm, dim), build_norm(options.norm, dim)
        self.qkv_proj, self.o_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.gate_proj = nn.Linear(dim, hidden) if options.gated_mlp else None
        self.up_proj, self.down_proj = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.activation = ACTIVATIONS[options.activation]

    def forward(self, x: Tensor, seen: Seen) -> Tensor:
        """(B, P, D) -> (B, P, D)."""
        q, k, v = self.qkv_proj(self.attn_norm(x)).unflatten(-1, (3, self.n_heads, -1)).unbind(2)
        q, k = rotate(q, seen.cos, seen.sin), rotate(k, seen.cos, seen.sin)
        x = x + self.o_proj(seen.segments.attend(q, k, v).flatten(2))
        y = self.mlp_norm(x)
        up = self.up_proj(y)
        hidden = self.activation(up) if self.gate_proj is None else self.activation(self.gate_proj(y)) * up
        result: Tensor = x + self.down_proj(hidden)
        return result


class PatchTransformer(nn.Module):
    """Patches to tokens; those of an image or of one step of a clip, or of a window of it, see each other."""

    def __init__(self, options: PatchesOptions) -> None:
        super().__init__()
        self.window = options.window
        self.head_dim = options.dim // options.n_heads
        self.full = frozenset(options.full_layers)
        self.patches = nn.Linear(3 * options.frames * options.patch_size**2, options.dim, bias=False)
        self.blocks = nn.ModuleList(PatchBlock(options) for _ in range(options.n_layers))

    def forward(self, patches: Tensor, layout: PatchLayout) -> Tensor:
        """(B, P, 3 * frames * p * p) normalised, channels first, then frames -> (B, P, D)."""
        x: Tensor = self.patches(patches)
        cos, sin = self._tables(layout, x)
        whole = Seen(cos, sin, Segments(layout.images))
        near = Seen(cos, sin, Segments(windows(layout, self.window))) if self.window else whole
        for number, block in enumerate(self.blocks):
            x = block(x, whole if number in self.full else near)
        return x

    def _tables(self, layout: PatchLayout, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin as `forge_core.model.rope.rotate` takes them: half of the pairs turn by the row, half
        by the column."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        width = self.head_dim // 2
        rates = 1.0 / THETA ** (torch.arange(0, width, 2, device=x.device).to(dtype) / width)
        angles = torch.cat([at[..., None].to(dtype) * rates for at in (layout.rows, layout.columns)], -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1)[:, :, None], torch.cat((-sin, sin), -1)[:, :, None]


class PatchMerger(nn.Module):
    """(B, P, D_in) -> (B, P / side ** 2, D_out), patches in the order of `forge_vlm.data.patches`, or of a
    grid where images have one size."""

    def __init__(self, spec: ConnectorSpec, options: MergerOptions) -> None:
        super().__init__()
        self.grid, self.side = spec.grid, options.side
        width = spec.in_dim * self.side**2
        self.norm = build_norm(options.norm, spec.in_dim)
        self.up_proj, self.down_proj = nn.Linear(width, width), nn.Linear(width, spec.out_dim)

    def forward(self, x: Tensor) -> Tensor:
        squares = windows_of(self.norm(x), self.grid, self.side).flatten(2)
        y: Tensor = self.down_proj(F.gelu(self.up_proj(squares)))
        return y
