"""Rows with clips and images between text, and what transformers takes of them, made without our cutting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
import vlmfolders
from numpy.typing import NDArray
from torch import Tensor

IMAGE_TOKEN, VIDEO_TOKEN, END = 98, 97, 2
LENGTH = 96
PATCH, SIDE = 4, 2
IMAGE_LIMITS = {"shortest_edge": 64, "longest_edge": 1024}
VIDEO_LIMITS = {"shortest_edge": 64, "longest_edge": 640}
TOKENS = 20
"""Nine tenths of it, 18 squares of 64 pixels, are the most of a clip's steps together."""


@attrs.frozen
class Moving:
    """A clip of random frames: how many, the seconds that one stands for, height and width."""

    frames: int
    seconds: float
    size: tuple[int, int] = (20, 37)

    def pictures(self) -> list[Any]:
        return [vlmfolders.noise(*self.size, seed=100 * self.frames + n) for n in range(self.frames)]


@attrs.frozen
class Still:
    """An image of random pixels."""

    size: tuple[int, int]

    def pictures(self) -> list[Any]:
        return [vlmfolders.noise(*self.size, seed=self.size[0])]


Item = Moving | Still | list[int]
"""What comes one after another in a row: ids of text, an image, a clip."""
ROWS: tuple[tuple[Item, ...], ...] = (
    # five frames: the last is repeated; text between, and an image behind
    ([5, 6, 7], Moving(5, 0.375), [8, 9, 10, 11], Still((40, 16)), [12, 13]),
    (Still((9, 9)), [14, 15], Moving(4, 0.25, (30, 12)), [16, 17, 18], Moving(2, 1.0), [19]),
    ([20, 21, 22, 23, 24],),
    (Moving(1, 1.0, (9, 30)), [25, 26]),
)


def row_of(session: Any, *samples: Sequence[Item]) -> dict[str, Tensor]:
    """One row with these samples as documents of their own, by what a run prepares rows with."""
    from forge_vlm.data.layout import Part, lay_out
    from forge_vlm.data.patches import grid_in
    from forge_vlm.data.pixels import ClipPixels, prepared, prepared_frame
    from forge_vlm.data.source import Row
    from forge_vlm.geometry import shape_of

    shape = shape_of(session.config)
    geometry: Any = shape.geometry
    row = Row(LENGTH, shape, END)
    for sample in samples:
        seen: list[Any] = []
        parts = []
        for item in sample:
            if isinstance(item, list):
                parts.append(Part(ids=tuple(item)))
                continue
            parts.append(Part(image=len(seen)))
            if isinstance(item, Moving):
                grid = geometry.clip_grid_of(item.frames, *item.size)[1:]
                frames = np.stack([prepared_frame(each, grid, geometry) for each in item.pictures()])
                seen.append(ClipPixels(frames, item.seconds))
            else:
                seen.append(prepared(item.pictures()[0], geometry))
        places = [shape.places_of(grid_in(each, shape)) for each in seen]
        row.add(lay_out(parts, places=places, limit=LENGTH, eos_id=END), seen)
    return {name: torch.from_numpy(np.asarray(value)) for name, value in row.finish().items()}


def pixels_of(item: Moving | Still) -> tuple[Tensor, list[int]]:
    """Patches (N, 3 * 2 * p * p) and their grid: every frame by transformers' image processor, two frames
    side by side as its video processor has them, which needs torchvision."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    limits = dict(IMAGE_LIMITS)
    if isinstance(item, Moving):
        limits = dict(VIDEO_LIMITS)
        share = int(TOKENS * (PATCH * SIDE) ** 2 * 0.9) * 2 // item.frames
        limits["longest_edge"] = max(min(limits["longest_edge"], share), int(limits["shortest_edge"] * 1.05))
    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=SIDE, temporal_patch_size=2, size=limits
    )
    found = [processor([each], return_tensors="pt") for each in item.pictures()]
    frames = [each["pixel_values"].unflatten(1, (3, 2, PATCH**2))[:, :, 0] for each in found]
    frames += frames[-1:] * (len(frames) % 2)
    pairs = [torch.stack((a, b), 2).flatten(1) for a, b in zip(frames[::2], frames[1::2], strict=True)]
    return torch.cat(pairs), [len(pairs), *found[0]["image_grid_thw"][0, 1:].tolist()]


def inputs_of(rows: Sequence[Sequence[Item]], *, seconds: bool) -> dict[str, Tensor]:
    """What transformers takes of these rows.

    Args:
        seconds: the model counts them.
    """
    ids = np.full((len(rows), LENGTH), END)
    kinds, real = np.zeros((2, len(rows), LENGTH), dtype=np.int64)
    found: dict[type, list[tuple[Tensor, list[int]]]] = {Still: [], Moving: []}
    steps: list[float] = []
    for number, row in enumerate(rows):
        at = 0
        for item in row:
            if isinstance(item, list):
                at = _put(ids[number], real[number], at, item)
                continue
            pixels, grid = pixels_of(item)
            found[type(item)].append((pixels, grid))
            moving = isinstance(item, Moving)
            count = len(pixels) // SIDE**2
            kinds[number, at : at + count] = 2 if moving else 1
            at = _put(ids[number], real[number], at, [VIDEO_TOKEN if moving else IMAGE_TOKEN] * count)
            steps += [2 * item.seconds] if isinstance(item, Moving) else []
    given = {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(real),
        "mm_token_type_ids": torch.from_numpy(kinds).int(),
    }
    for kind, pixels_key, grid_key in (
        (Still, "pixel_values", "image_grid_thw"),
        (Moving, "pixel_values_videos", "video_grid_thw"),
    ):
        if found[kind]:
            given[pixels_key] = torch.cat([pixels for pixels, _ in found[kind]])
            given[grid_key] = torch.tensor([grid for _, grid in found[kind]])
    if steps and seconds:
        given["second_per_grid_ts"] = torch.tensor(steps)
    return given


def _put(ids: NDArray[Any], real: NDArray[Any], at: int, tokens: Sequence[int]) -> int:
    """Tokens from `at` on; where they end."""
    end = at + len(tokens)
    ids[at:end], real[at:end] = tokens, 1
    return end
