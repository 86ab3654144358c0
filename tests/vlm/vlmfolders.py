"""Folders of models of transformers that see; pictures, rows of them and text, and logits of both sides."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

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


def photograph(file: Path, width: int = 300, height: int = 200) -> Path:
    """`file` with a stretch of a photograph of these pixels."""
    from PIL import Image

    photographs = Path(str(pytest.importorskip("sklearn.datasets").__file__)).parent / "images"
    Image.open(photographs / "china.jpg").crop((50, 20, 50 + width, 20 + height)).save(file)
    return file


def row_of(
    session: Any, samples: Sequence[Sample], picture: Callable[[int], Any], *, length: int, end: int
) -> dict[str, Tensor]:
    """One row with these samples as documents of their own.

    Args:
        picture: by its number. length: of the row. end: id behind each sample.
    """
    from forge_vlm.data.layout import Part, lay_out
    from forge_vlm.data.patches import grid_in
    from forge_vlm.data.pixels import prepared
    from forge_vlm.data.source import Row
    from forge_vlm.geometry import shape_of

    shape = shape_of(session.config)
    row = Row(length, shape, end)
    for sample in samples:
        seen = [prepared(picture(item), shape.geometry) for item in sample if isinstance(item, int)]
        places = [shape.places_of(grid_in(each, shape)) for each in seen]
        images = iter(range(len(seen)))
        parts = [Part(image=next(images)) if isinstance(i, int) else Part(ids=tuple(i)) for i in sample]
        row.add(lay_out(parts, places=places, limit=length, eos_id=end, marker=shape.marker), seen)
    return {name: torch.from_numpy(np.asarray(value)) for name, value in row.finish().items()}


def stacked(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows as a batch."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@torch.no_grad()
def logits_of(session: Any, batch: dict[str, Tensor], *, text: bool = False) -> Tensor:
    """Of ours; with `text` as if the batch had no pictures."""
    from forge_vlm.model import IMAGE_KEYS

    images = None if text else {name: batch[name] for name in IMAGE_KEYS if name in batch}
    whole = {name: batch[name] for name in ("positions", "documents", "valid")}
    model = session.model
    logits: Tensor = model.logits(model(batch["tokens"], images=images, apart=True, **whole))
    return logits


@torch.no_grad()
def logits_of_theirs(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits
