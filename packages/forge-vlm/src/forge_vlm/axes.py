"""Positions on three axes, time, height and width, for decoders that rotate by all of them (M-RoPE).

A token of text moves on by one on all of them. The tokens of an image share one time and stand at their
rows and columns, counted from where the image starts; what follows goes on behind its longer side (Wang et
al. 2024, "Qwen2-VL", section 2.1). The steps of a clip along time are apart by one, or by the positions that
their seconds take (Bai et al. 2025, "Qwen2.5-VL", section 2.1.2). In each document they start anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge_core.model.documents import positions_within


def axis_positions(
    positions: Tensor,
    documents: Tensor | None,
    images: dict[str, Tensor],
    grids: Tensor,
    *,
    past_time: bool = False,
) -> tuple[Tensor, Tensor]:
    """Positions on the three axes, on the device and without a host sync.

    Args:
        positions: (B, S), of each token in its document, an image's one after another.
        documents: (B, S), or None for one a row.
        images: see `forge_vlm.model.Images`; `steps` says how far steps along time are apart, by default 1.
        grids: (B, M, 3), visual tokens along time, height and width.
        past_time: text goes on behind the time of a clip, too, where that is longer than its sides.

    Returns:
        (B, 3, S) int64, and (B, 1), how far text behind all images of a row stays behind `positions`.
    """
    counts, present = grids.prod(-1), images["present"]
    steps = images.get("steps", torch.ones_like(counts, dtype=torch.float32))
    taken = grids[..., 1:].amax(-1)
    if past_time:
        last = (grids[..., 0] - 1).clamp(min=0)
        taken = torch.maximum(taken, (last * steps).long() + 1)
    saved = (counts - taken) * present
    at = torch.arange(positions.shape[-1], device=positions.device)[None, :, None]
    starts, ends = images["image_places"][:, None], (images["image_places"] + counts)[:, None]
    before = (ends <= at) & present[:, None]
    if documents is not None:
        before = before & (images["image_documents"][:, None] == documents[..., None])
    base = positions - (before * saved[:, None]).sum(-1)
    inside = (starts <= at) & (at < ends) & present[:, None] & (images["image_index"] >= 0)[..., None]
    number = ((at - starts) * inside).sum(-1)
    across = (grids[..., 2][:, None] * inside).sum(-1).clamp(min=1)
    each = (grids[..., 1:].prod(-1)[:, None] * inside).sum(-1).clamp(min=1)
    start = base - number
    visual = inside.any(-1)
    times = (number // each * (steps[:, None] * inside).sum(-1)).long()
    rows, columns = number % each // across, number % across
    axes = [torch.where(visual, start + more, base) for more in (times, rows, columns)]
    return torch.stack(axes, 1), saved.sum(-1, keepdim=True)


def placed(
    tokens: Tensor,
    images: dict[str, Tensor] | None,
    grids: Tensor | None,
    memory: dict[str, Any],
    inputs: dict[str, Any],
    *,
    past_time: bool = False,
) -> Tensor | None:
    """The positions of one forward of a decoder with several axes.

    Args:
        tokens: (B, S).
        images, grids, past_time: see `axis_positions`; None where this forward has no images.
        memory: keeps from one step of a generation to the next how far text stays behind.
        inputs: `positions`, `documents` and `cache` as the decoder would get them.

    Returns:
        (B, 3, S); (B, 1, S) or (B, S) where all axes are one; None where the decoder's own count is right.
    """
    behind: Tensor | None = memory.get("behind")
    if (grids is None or images is None) and behind is None:
        given: Tensor | None = inputs["positions"]
        return given
    positions = counted(tokens, images, inputs)
    if grids is None or images is None:
        # on an axis of their own, as they may be beyond the length of the model behind a long video
        return positions if behind is None else (positions - behind)[:, None]
    found, memory["behind"] = axis_positions(
        positions, inputs["documents"], images, grids, past_time=past_time
    )
    return found


def counted(tokens: Tensor, images: dict[str, Tensor] | None, inputs: dict[str, Any]) -> Tensor:
    """(B, S) int64, the positions of tokens (B, S) as the decoder counts them, from 0 in each document.

    Args:
        images, inputs: see `placed`.
    """
    positions: Tensor | None = inputs["positions"]
    documents, cache = inputs["documents"], inputs["cache"]
    if positions is None and documents is not None:
        positions = positions_within(documents)
    if positions is None:
        first = 0 if cache is None else cache.length
        there = tokens if images is None else images["present"]  # ids may be on the meta device
        positions = torch.arange(first, first + tokens.shape[1], device=there.device)
    return positions.expand(tokens.shape)


def of_modality(positions: Tensor, index: Tensor) -> Tensor:
    """Positions that text and visual tokens count each on their own, from 0 in each document.

    Args:
        positions: (B, S) int64, of each token in its document.
        index: (B, S), -1 where there is text.

    Returns:
        (B, S) int64.
    """
    visual = index >= 0
    before = visual.cumsum(1) - visual.long()
    first = torch.arange(positions.shape[1], device=positions.device) - positions
    before = before - before.gather(1, first.clamp(min=0))
    return torch.where(visual, before, positions - before)
