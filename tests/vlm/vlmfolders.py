"""Models of transformers that see pictures in sizes of their own, in folders, and pictures of given sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Sample = tuple[int | list[int], ...]
"""Ids of text, and numbers of pictures."""


def saved(model: Any, folder: Path, processor: Mapping[str, Any], **options: Any) -> Path:
    """`folder` with a model of transformers and what its processor's file says."""
    model.save_pretrained(folder, **options)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return folder


def opened(folder: Path, length: int, *more: str) -> Any:
    """The folder as ours, for sequences of `length` tokens and at most three pictures."""
    from forge_ckpt.hf.opening import open_model

    return open_model(folder, ["--vlm.max_images=3", f"--train.seq_len={length}", *more])


def noise(height: int, width: int, seed: int) -> Any:
    """A picture of random pixels."""
    from PIL import Image

    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
