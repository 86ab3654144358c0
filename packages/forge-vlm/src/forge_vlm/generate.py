"""Generation from prompts with images, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
from torch import Tensor

from forge_core.config.tables import EvalConfig, ModelConfig
from forge_core.errors import ForgeError
from forge_core.loss.shift import IGNORE
from forge_core.model.generate import evaluating
from forge_core.model.sampling import Sampler
from forge_vlm.data.layout import Part, lay_out
from forge_vlm.data.pixels import Pixels, read_pixels
from forge_vlm.data.source import Row
from forge_vlm.draw import draw
from forge_vlm.geometry import shape_of
from forge_vlm.model import IMAGE_KEYS
from forge_vlm.table import VlmConfig

if TYPE_CHECKING:
    from forge_core import TrainingSession

PLACEHOLDER = "<image>"


@attrs.frozen(kw_only=True)
class Prompts:
    """Prompts of one batch, as rows that start at position 0 and end where the answer is to begin.

    Attributes:
        tokens: (B, S) int64; what follows a prompt is not looked at.
        lengths: of the prompts, each at least 1.
        images: see `forge_vlm.model.Images`; None without.
    """

    tokens: Tensor
    lengths: Sequence[int]
    images: dict[str, Tensor] | None = None


def left_padded(prompts: Prompts) -> tuple[Tensor, Tensor, dict[str, Tensor] | None]:
    """Tokens (B, L) that end in one column, which are real (B, L), and the images' keys moved alike."""
    longest = max(prompts.lengths)
    shift = torch.tensor([longest - n for n in prompts.lengths])[:, None]
    at = torch.arange(longest)[None] - shift
    real, source = at >= 0, at.clamp(min=0)

    def move(value: Tensor, empty: int) -> Tensor:
        return torch.where(
            real, value[:, :].gather(1, source), torch.full_like(source, empty).to(value.dtype)
        )

    tokens = move(prompts.tokens, 0)
    if prompts.images is None:
        return tokens, real, None
    images = dict(prompts.images)
    images["image_index"] = move(images["image_index"], -1)
    images["image_places"] = images["image_places"] + shift
    images["prompt"] = real
    return tokens, real, images


@torch.no_grad()
def generate(
    model: Any,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    eos_id: int | None = None,
    stop_early: bool = True,
    **sampling: Any,
) -> list[list[int]]:
    """Continue every prompt. Greedily, a row gets what it would get alone, whatever else is in the batch.

    Args:
        model: a `VisionLanguageModel`; its modes are put back at the end.
        prompts: on the CPU.
        max_new_tokens: most tokens added to a row.
        eos_id: a row ends with this token.
        stop_early: stop when all rows have ended; ranks that work together must not.
        sampling: see `Sampler`.

    Returns:
        The new tokens of each row, its end included and nothing after it.
    """
    sampler = Sampler(**sampling)
    with evaluating(model):
        columns = list(_columns(model, prompts, max_new_tokens, sampler, eos_id, stop_early))
    rows: list[list[int]] = torch.stack(columns, 1).tolist()
    return [row[: row.index(eos_id) + 1] if eos_id in row else row for row in rows]


def _columns(
    model: Any, prompts: Prompts, count: int, sampler: Sampler, eos_id: int | None, stop_early: bool
) -> Iterator[Tensor]:
    """The next token of every row, (B,) int64, again and again."""
    device = model.pixel_mean.device
    tokens, real, images = left_padded(prompts)
    tokens, real = tokens.to(device), real.to(device)
    images = None if images is None else {name: value.to(device) for name, value in images.items()}
    rows, width = tokens.shape
    padding = (~real).sum(1, keepdim=True)
    ragged = bool(padding.any())
    if images is not None:  # a row is one document
        images["image_documents"] = torch.where(images["present"], 0, images["image_documents"])
    cache, seen = model.new_cache(rows, width + count), {}  # type: ignore[var-annotated]
    index = torch.arange(width + count, device=device)[None]
    positions = (index[:, :width] - padding).clamp(min=0) if ragged else None
    valid = real if ragged else None
    hidden = model(tokens, images=images, seen=seen, positions=positions, valid=valid, cache=cache)
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    for end in range(width, width + count):
        new = sampler(model.logits(hidden[:, -1]))
        if eos_id is not None:
            ended = ended | (new == eos_id)
        yield new
        if end + 1 == width + count or (stop_early and eos_id is not None and bool(ended.all())):
            return
        positions = index[:, end : end + 1] - padding if ragged else None
        hidden = model(new[:, None], seen=seen, positions=positions, cache=cache)


def questions_of(batch: dict[str, Tensor]) -> tuple[Prompts, list[list[int]]]:
    """What comes before the first supervised token of each row, and what is supervised from there on.

    An answer ends at the first gap; that of a row without a label is empty.
    """
    targets = batch["targets"].numpy()
    lengths, answers = [], []
    for row in targets:
        places = np.flatnonzero(row != IGNORE)
        start = int(places[0]) if len(places) else 0
        after = np.flatnonzero(row[start:] == IGNORE)
        end = start + int(after[0]) if len(after) else len(row)
        lengths.append(start + 1)
        answers.append(row[start:end].tolist())
    images = {name: batch[name] for name in IMAGE_KEYS} if "pixels" in batch else None
    return Prompts(tokens=batch["tokens"], lengths=lengths, images=images), answers


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
                places=shape.places,
                limit=limit,
                eos_id=tokenizer.eos_id,
            )
            if laid.cut:
                raise ForgeError(f"prompt {number} and {room} new tokens exceed model.max_seq_len")
            row = Row(max(limit, 1), shape, tokenizer.eos_id)
            row.add(laid, found)
            rows.append(row.finish())
            lengths.append(max(len(laid.tokens), 1))
        stacked = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
        images = {name: stacked[name] for name in IMAGE_KEYS}
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
        lines = ["--- sample: held-out questions"]
        for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            lines += _shown(batch, number, prompts.lengths[number], tokenizer)
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


def _shown(batch: dict[str, Tensor], number: int, length: int, tokenizer: Any) -> list[str]:
    """Pictures and question of one row."""
    lines = []
    if "pixels" in batch:
        for picture, here in zip(batch["pixels"][number], batch["present"][number], strict=True):
            if bool(here):
                lines.append(draw(picture.numpy()))
        index = batch["image_index"][number, :length]
        text = batch["tokens"][number, :length][index < 0]
    else:
        text = batch["tokens"][number, :length]
    lines.append(tokenizer.decode(text.tolist()).strip())
    return lines


def _pixels(image: Any, session: TrainingSession) -> Pixels:
    if isinstance(image, np.ndarray):
        return image
    return read_pixels(Path(image), shape_of(session.config).geometry)
