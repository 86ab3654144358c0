"""Texts and pictures in, texts out: the generator of a session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forge_core.config.tables import EvalConfig, ModelConfig
from forge_core.errors import ForgeError
from forge_vlm.data.layout import Part, lay_out
from forge_vlm.data.patches import pictures_in
from forge_vlm.data.pixels import Pixels, pillow, prepared, read_pixels
from forge_vlm.data.source import Row
from forge_vlm.draw import draw
from forge_vlm.generate import Prompts, generate, questions_of
from forge_vlm.geometry import ImageGeometry, ImageShape, shape_of
from forge_vlm.model import IMAGE_KEYS
from forge_vlm.table import VlmConfig

if TYPE_CHECKING:
    from forge_core import TrainingSession

PLACEHOLDER = "<image>"


class VlmGenerator:
    """A prompt is a text, or a dict with `prompt` and `images` (paths or (3, H, W) uint8 arrays)."""

    def generate(
        self, session: TrainingSession, prompts: Sequence[Any], *, max_new_tokens: int, **sampling: Any
    ) -> list[str]:
        """The text that follows each prompt, without the end of the document.

        On several ranks all call it with the same prompts; sampling that is not greedy then needs one
        `generator` that is seeded alike on all.

        Raises:
            ForgeError: more images than a sequence can hold, placeholders that do not fit them, or prompts
                that leave no room.
        """
        tokenizer = session.data.tokenizer
        eos_id = sampling.setdefault("eos_id", tokenizer.eos_id)
        batch = self._batch(session, prompts, max_new_tokens)
        rows = generate(
            session.model,
            batch,
            max_new_tokens=max_new_tokens,
            stop_early=session.control is None,
            **sampling,
        )
        return [tokenizer.decode(row[:-1] if row[-1] == eos_id else row) for row in rows]

    def _batch(self, session: TrainingSession, prompts: Sequence[Any], room: int) -> Prompts:
        from forge_vlm.data.layout import parts_of, pieces_of

        tokenizer, shape = session.data.tokenizer, shape_of(session.config)
        limit = (session.config[ModelConfig].max_seq_len or 0) - room
        rows, lengths = [], []
        for number, prompt in enumerate(prompts):
            given = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
            found = [_pixels(image, session) for image in given.get("images", [])]
            if len(found) > shape.most:
                raise ForgeError(f"prompt {number} has {len(found)} images, vlm.max_images = {shape.most}")
            pieces = pieces_of({"prompt": given["prompt"], "answer": ""}, None)[:1]
            parts = parts_of(pieces, len(found), tokenizer, PLACEHOLDER)
            laid = lay_out(
                parts or [Part(ids=(tokenizer.eos_id,))],
                places=[shape.places_of(shape.grid_of(*each.shape[1:])) for each in found],
                limit=limit,
                eos_id=tokenizer.eos_id,
                marker=shape.marker,
            )
            if laid.cut:
                raise ForgeError(f"prompt {number} and {room} new tokens exceed model.max_seq_len")
            row = Row(max(limit, 1), shape, tokenizer.eos_id)
            row.add(laid, found)
            rows.append(row.finish())
            lengths.append(max(len(laid.tokens), 1))
        stacked = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
        images = {name: stacked[name] for name in IMAGE_KEYS if name in stacked}
        return Prompts(tokens=stacked["tokens"], lengths=lengths, images=images)

    def sample(self, session: TrainingSession) -> str:
        """Held-out questions with their pictures, and what the model answers."""
        config = session.config[VlmConfig]
        count, length = config.shown_samples, session.config[EvalConfig].sample_tokens or 1
        tokenizer = session.data.tokenizer
        batch = _some(session, count)
        if batch is None:
            return "--- sample: nothing is held out, so there is no question"
        prompts, answers = questions_of(batch)
        length = min(length, (session.config[ModelConfig].max_seq_len or 1) - max(prompts.lengths))
        length = max(1, min(length, config.answer_tokens or length))
        rows = generate(
            session.model,
            prompts,
            max_new_tokens=length,
            eos_id=tokenizer.eos_id,
            stop_early=session.control is None,
            temperature=0.0,
        )
        shape = shape_of(session.config)
        lines = ["--- sample: held-out questions"]
        for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            lines += _shown(batch, number, prompts.lengths[number], tokenizer, shape)
            said, right = (tokenizer.decode(i for i in r if i != tokenizer.eos_id) for r in (row, answer))
            lines.append(f"the model answers {said!r}" + ("" if said == right else f", right is {right!r}"))
        return "\n".join([*lines, "---"])


def _some(session: TrainingSession, count: int) -> dict[str, Tensor] | None:
    """The first `count` rows that are held out, the same on all ranks."""
    for dataset in session.data.evaluation:
        source: Any = getattr(dataset, "source", None)
        if source is None or not hasattr(source, "__getitem__"):
            continue
        total = len(source)
        chosen = sorted({number * total // count for number in range(min(count, total))})
        rows = [source[number] for number in chosen]
        return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    return None


def _shown(
    batch: dict[str, Tensor], number: int, length: int, tokenizer: Any, shape: ImageShape
) -> list[str]:
    """Pictures and question of one row."""
    lines = []
    if "present" in batch:
        lines += [
            draw(picture) for picture in pictures_in({k: v[number].numpy() for k, v in batch.items()}, shape)
        ]
        index = batch["image_index"][number, :length]
        text = batch["tokens"][number, :length][index < 0]
    else:
        text = batch["tokens"][number, :length]
    lines.append(tokenizer.decode(text.tolist()).strip())
    return lines


def _pixels(image: Any, session: TrainingSession) -> Pixels:
    geometry = shape_of(session.config).geometry
    if not isinstance(image, np.ndarray):
        return read_pixels(Path(image), geometry)
    if isinstance(geometry, ImageGeometry):
        return image
    return prepared(pillow().fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))), geometry)
