"""Texts and pictures in, texts out: the generator of a session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forge_core.config.tables import EvalConfig, ModelConfig
from forge_core.data.wording import counted
from forge_core.errors import ForgeError, UsageError
from forge_vlm.data.layout import Laid, Part, lay_out, parts_of, pieces_of
from forge_vlm.data.order import in_order
from forge_vlm.data.patches import grid_in, pictures_in
from forge_vlm.data.picture import Blob
from forge_vlm.data.pieces import Cutting
from forge_vlm.data.pixels import Shown, prepared_array, read_pixels
from forge_vlm.data.rows import Row
from forge_vlm.data.video import footage, look_at, read_clip, read_frames
from forge_vlm.draw import Gallery
from forge_vlm.generate import Prompts, generate, questions_of
from forge_vlm.geometry import ImageShape, around_images, shape_of
from forge_vlm.model import IMAGE_KEYS
from forge_vlm.table import VlmConfig

if TYPE_CHECKING:
    from forge_core import TrainingSession

PLACEHOLDER = "<image>"
SAMPLE_FOLDER = "sample"
"""In the folder of a run: pictures of the questions that it ends with."""


class VlmGenerator:
    """A prompt is a text, or a mapping with `prompt` and `images` (paths or (3, H, W) uint8 arrays, each
    `<image>` in the text standing for the next one) and `video` or `videos` (paths, each `<video>` standing
    for the next one); without any they come first, images before videos."""

    def generate(
        self, session: TrainingSession, prompts: Sequence[Any], *, max_new_tokens: int, **sampling: Any
    ) -> list[str]:
        """The text that follows each prompt, without the end of the document.

        On several ranks all call it with the same prompts; sampling that is not greedy then needs one
        `generator` that is seeded alike on all.

        Raises:
            ForgeError: an image or video that cannot be read, more images than a sequence can hold,
                placeholders that do not fit them, or prompts that leave no room.
        """
        if not prompts:
            return []
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
        tokenizer, shape = session.data.tokenizer, shape_of(session.config)
        limit = (session.config[ModelConfig].max_seq_len or 0) - room
        cutting = Cutting.of(session.config, tokenizer, shape)
        rows, lengths = [], []
        for number, prompt in enumerate(prompts):
            text, found = seen_with(prompt, session)
            pieces = pieces_of({"prompt": text, "answer": ""}, None)[:1]
            parts = parts_of(pieces, len(found), tokenizer, PLACEHOLDER, around_images(session.config))
            if cutting is not None:
                parts, found = cutting.prompt(parts, found)
            if len(found) > shape.most:
                message = f"prompt {number} has {counted(len(found), 'image')}, vlm.max_images = {shape.most}"
                raise ForgeError(message, "give fewer, or train with a higher vlm.max_images")
            laid = lay_out(
                parts or [Part(ids=(tokenizer.eos_id,))],
                places=[shape.places_of(grid_in(each, shape)) for each in found],
                limit=limit + room,
                eos_id=tokenizer.eos_id,
                marker=shape.marker,
            )
            if laid.cut or len(laid.tokens) > limit:
                raise _no_room(number, laid, room, limit + room)
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
        lines, shape = ["--- sample: held-out questions"], shape_of(session.config)
        gallery = Gallery(session.run.path / SAMPLE_FOLDER if session.ranks.rank == 0 else None)
        for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            lines += _shown(batch, number, prompts.lengths[number], tokenizer, shape, gallery)
            said, right = (tokenizer.decode(i for i in r if i != tokenizer.eos_id) for r in (row, answer))
            lines.append(f"the model answers {said!r}" + ("" if said == right else f", right is {right!r}"))
        return "\n".join([*lines, "---"])


def _some(session: TrainingSession, count: int) -> dict[str, Tensor] | None:
    """Rows that are held out, the same on all ranks: of the first set with images, else of the first."""
    found: list[dict[str, Tensor]] = []
    for dataset in session.data.evaluation:
        source: Any = getattr(dataset, "source", None)
        if source is None or not hasattr(source, "__getitem__"):
            continue
        total = len(source)
        chosen = sorted({number * total // count for number in range(min(count, total))})
        rows = [source[number] for number in chosen]
        found.append({name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]})
        if "present" in found[-1] and bool(found[-1]["present"].any()):
            return found[-1]
    return found[0] if found else None


def _shown(
    batch: dict[str, Tensor], number: int, length: int, tokenizer: Any, shape: ImageShape, gallery: Gallery
) -> list[str]:
    """Pictures and question of one row."""
    text = batch["tokens"][number, :length]
    if "present" not in batch:
        return [tokenizer.decode(text.tolist()).strip()]
    row = {name: value[number].numpy() for name, value in batch.items()}
    lines = [gallery.show(picture) for picture in pictures_in(row, shape)]
    text = text[batch["image_index"][number, :length] < 0]
    return [*lines, tokenizer.decode(text.tolist()).strip()]


def seen_with(prompt: Any, session: TrainingSession) -> tuple[str, list[Shown]]:
    """The text of a prompt, with a placeholder for each image, frame or clip, and these as they come in it.

    Raises:
        ForgeError: it has something else, or a file that cannot be read.
    """
    if isinstance(prompt, str):
        return prompt, []
    unknown = [name for name in prompt if name not in ("prompt", "images", "video", "videos")]
    if unknown:
        raise UsageError(f"a prompt has {', '.join(unknown)}", "prompt, images, video and videos are known")
    if not isinstance(prompt.get("prompt"), str):
        raise UsageError("a prompt has no text", 'give {"prompt": "...", "images": [...]}')
    text, geometry = prompt["prompt"], shape_of(session.config).geometry
    images = [each if isinstance(each, np.ndarray) else Path(each) for each in _given(prompt, "images")]
    found: list[Shown] = [
        prepared_array(each, geometry) if isinstance(each, np.ndarray) else read_pixels(each, geometry)
        for each in images
    ]
    paths = [prompt["video"]] if prompt.get("video") is not None else _given(prompt, "videos")
    videos = [_frames(Path(path), session) for path in paths]
    (text,), found = in_order([text], found, videos, PLACEHOLDER)
    return text, found


def _given(prompt: Any, name: str) -> Sequence[Any]:
    """What a prompt has under a name that may be left out, or null in a file of JSON."""
    found: Sequence[Any] | None = prompt.get(name)
    return () if found is None else found


def _frames(path: Path, session: TrainingSession) -> list[Shown]:
    """Frames of a video as `[vlm.video]` picks them, or the clip that they are together."""
    name = session.config[VlmConfig].video.frames
    sampler = session.component("vlm_frames", name)(session.options("vlm.video", name))
    shape, clip = shape_of(session.config), Blob(path, path.name)
    if shape.clips:
        return [read_clip(footage(clip, look_at(clip, upright=True), sampler), shape.geometry)]
    return list(read_frames(clip, sampler(look_at(clip)), shape.geometry))


def _no_room(number: int, laid: Laid, room: int, most: int) -> ForgeError:
    """The error for a prompt that leaves no room for `room` tokens more, of `most` in all."""
    if laid.cut or len(laid.tokens) == most:
        message = f"prompt {number} alone fills model.max_seq_len = {most}"
        return ForgeError(message, "shorten it, or give fewer images")
    size = len(laid.tokens)
    message = (
        f"prompt {number} of {counted(size, 'token')}, its images' among them, and {room} new ones exceed "
    )
    left = counted(most - size, "new token")
    hint = f"ask for at most {left} (--max-new-tokens), shorten it, or give fewer images"
    return ForgeError(f"{message}model.max_seq_len = {most}", hint)
