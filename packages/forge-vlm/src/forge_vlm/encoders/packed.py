"""What encoders share that see images in sizes of their own: where patches are, and who sees whom."""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor


def on_host(x: Tensor) -> bool:
    """Whether asking x for a number costs nothing; elsewhere the host would wait for the device."""
    return x.device.type == "cpu"


@attrs.frozen
class PatchLayout:
    """Where the patches of a batch are in their images.

    Attributes:
        rows, columns: (B, P) int64, place of each patch in its image.
        images: (B, P) int64, equal for patches of one image, or of one step of a clip along time, and for no
            others of the batch; -1 for padding.
    """

    rows: Tensor
    columns: Tensor
    images: Tensor

    def chosen(self, kept: Tensor) -> PatchLayout:
        """(1, N) of the patches with these numbers (N,) in the flattened batch."""
        return PatchLayout(*(x.flatten()[kept][None] for x in (self.rows, self.columns, self.images)))


def layout_of(grids: Tensor, room: int, side: int) -> PatchLayout:
    """Where patches are that stand in the order of `forge_vlm.data.patches.patches_of`, without a host sync.

    Args:
        grids: (B, M, 3), patches along time, height and width of each image, 0 where there is none.
        room: P. side: patches along a side of the squares that stand together.
    """
    rows, slots = grids.shape[:2]
    counts = grids.prod(-1)
    ends = counts.cumsum(-1)
    at = torch.arange(room, device=grids.device).expand(rows, -1)
    image = (at[..., None] >= ends[:, None]).sum(-1)
    there = image < slots
    slot = image.clamp(max=slots - 1)
    local = at - (ends - counts).gather(1, slot)
    across = (grids[..., 2].gather(1, slot) // side).clamp(min=1)
    step = grids[..., 1:].prod(-1).gather(1, slot).clamp(min=1)
    square, inside = local % step // side**2, local % side**2
    number = slot + slots * torch.arange(rows, device=grids.device)[:, None]
    number = number * room + local // step
    return PatchLayout(
        square // across * side + inside // side,
        square % across * side + inside % side,
        torch.where(there, number, -1),
    )


class Segments:
    """Attention inside segments: patches see those with the same number, all of them.

    On a CPU segments of one length run together and nothing else is computed; elsewhere one mask keeps them
    apart, so that the host need not know their lengths.

    Args:
        numbers: (B, P) int64.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.mask: Tensor | None = None
        self.groups: list[Tensor] = []
        if not on_host(numbers):
            self.mask = (numbers[:, :, None] == numbers[:, None, :])[:, None]
            return
        numbers = numbers - numbers.min()
        flat = (numbers + torch.arange(len(numbers))[:, None] * (numbers.max() + 1)).flatten()
        order = flat.argsort(stable=True)
        lengths = torch.unique_consecutive(flat[order], return_counts=True)[1]
        parts = torch.split(order, lengths.tolist())
        for length in sorted(set(lengths.tolist())):
            self.groups.append(torch.stack([part for part in parts if len(part) == length]))
        self.back = torch.cat([group.flatten() for group in self.groups]).argsort()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, P, heads, head_dim) each -> (B, P, heads, head_dim)."""
        if self.mask is not None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(1, 2)
        whole = [x.flatten(0, 1) for x in (q, k, v)]
        done = []
        for group in self.groups:
            picked = (x.index_select(0, group.flatten()).view(*group.shape, *x.shape[1:]) for x in whole)
            one, two, three = (x.transpose(1, 2) for x in picked)
            done.append(F.scaled_dot_product_attention(one, two, three).transpose(1, 2).flatten(0, 1))
        return torch.cat(done).index_select(0, self.back).view_as(q)


def windows(layout: PatchLayout, side: int) -> Tensor:
    """(B, P) numbers that are equal for patches of one window of side x side patches of one image."""
    return (layout.images << 32) + (layout.rows // side << 16) + layout.columns // side
