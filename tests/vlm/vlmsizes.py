"""Pictures of many sizes, and tables of runs that see them as patches and as tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from vlmkit import Tables, merged, write_samples

ENCODER = {
    "image_size": 8,
    "patch_size": 4,
    "max_tiles": 4,
    "dim": 16,
    "n_layers": 2,
    "n_global_layers": 1,
    "n_heads": 2,
    "hidden_dim": 24,
    "taken": [0],
}
MARKER = 258
"""Behind the 257 tokens of bytes."""
TILED: Tables = {
    "vlm": {
        "max_images": 2,
        "image_token_id": MARKER,
        "fusion": "gated_cross_attention",
        "gated_cross_attention": {"layers": [1], "extra_tokens": 8},
        "encoder": {"name": "tiles", "frozen": False, "tiles": ENCODER},
        "connector": {"name": "linear"},
    },
}
PATCHES: dict[str, Any] = {
    "patch_size": 4,
    "min_pixels": 64,
    "max_pixels": 256,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 24,
    "window": 2,
    "full_layers": [1],
}
PACKED: Tables = {
    "vlm": {
        "max_images": 2,
        "encoder": {
            "name": "patches",
            "frozen": False,
            "patches": PATCHES,
        },
        "connector": {"name": "patch_merger"},
    },
    "model": {"rope_sections": [2, 1, 1]},
}
CLIPS: Tables = merged(
    PACKED,
    {
        "vlm": {
            "max_images": 3,
            "max_patches": 96,
            "encoder": {
                "patches": {
                    "video_min_pixels": 64,
                    "video_max_pixels": 256,
                    "video_tokens": 18,
                    "tokens_per_second": 2.0,
                }
            },
            "video": {"frames": "stretches", "stretches": {"fps": 1.0, "min_frames": 2, "max_frames": 6}},
        }
    },
)
SIZES = ((8, 8), (8, 16), (20, 8), (30, 33), (5, 7), (16, 16))
"""Heights and widths of the pictures 0.png, 1.png, ...."""


def records_in_turn(count: int) -> list[dict[str, Any]]:
    """Two images with text between them, one, and none, in turn."""
    found: list[dict[str, Any]] = []
    for number in range(count):
        record: dict[str, Any] = {"prompt": f"q{number} ", "answer": f"a{number}"}
        one, other = f"{number % 6}.png", f"{(number + 2) % 6}.png"
        if number % 3 == 0:
            record |= {"images": [one, other], "prompt": f"x<image>y{number}<image>? "}
        elif number % 3 == 1:
            record |= {"image": one}
        found.append(record)
    return found


def write_sizes(folder: Path) -> Path:
    """Samples of those pictures."""
    write_samples(folder, records_in_turn(24))
    random = np.random.default_rng(0)
    for number, size in enumerate(SIZES):
        pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def write_moving(folder: Path) -> Path:
    """Samples with a clip, with a clip and an image, with two clips, with an image, and without, in turn."""
    from vlmdatakit import write_clip

    kinds: tuple[dict[str, Any], ...] = (
        {"video": "long.mp4", "prompt": "x<video>? "},
        {"video": "short.mp4", "image": "0.png", "prompt": "<image>x<video>? "},
        {"videos": ["short.mp4", "long.mp4"]},
        {"image": "1.png"},
        {},
    )
    write_samples(folder, [{"prompt": f"q{n} ", "answer": f"a{n}"} | kinds[n % 5] for n in range(24)])
    write_clip(folder / "long.mp4")
    write_clip(folder / "short.mp4", 13)
    return folder
