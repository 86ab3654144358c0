"""Generation from prompts with images, with a cache of keys and values."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from forge_core.errors import UsageError
from forge_core.loss.shift import IGNORE
from forge_core.model.generate import evaluating
from forge_core.model.sampling import Sampler
from forge_vlm.model import IMAGE_KEYS


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
        return torch.where(real, value.gather(1, source), torch.full_like(source, empty).to(value.dtype))

    tokens = move(prompts.tokens, 0)
    if prompts.images is None:
        return tokens, real, None
    images = dict(prompts.images)
    images["image_index"] = move(images["image_index"], -1)
    images["image_places"] = images["image_places"] + shift
    images["prompt"] = real
    return tokens, real, images


class Reading:
    """Prompts that a model has read, images and all, to go on from.

    Args:
        model: a `VisionLanguageModel` in evaluation mode, under `torch.no_grad()`.
        prompts: on the CPU.
        room: most tokens that may follow.

    Attributes:
        logits: (B, V) of the token behind each prompt.
    """

    def __init__(self, model: Any, prompts: Prompts, room: int) -> None:
        self.model, self.device = model, next(model.parameters()).device
        tokens, real, images = left_padded(prompts)
        tokens, real = tokens.to(self.device), real.to(self.device)
        images = None if images is None else {name: value.to(self.device) for name, value in images.items()}
        if images is not None:  # a row is one document
            images["image_documents"] = torch.where(images["present"], 0, images["image_documents"])
        rows, self.end = tokens.shape
        self._padding = (~real).sum(1, keepdim=True)
        self._last = (model.config.max_seq_len or self.end + room) - 1
        # a row that is full has nothing left to say, while others of its batch may
        self._own_positions = bool(self._padding.any()) or self.end + room > self._last + 1
        self._cache, self._seen = model.new_cache(rows, self.end + room), {}  # type: ignore[var-annotated]
        hidden = model(
            tokens,
            images=images,
            seen=self._seen,
            positions=self._positions(0, self.end),
            valid=real if bool(self._padding.any()) else None,
            cache=self._cache,
        )
        self.logits: Tensor = model.logits(hidden[:, -1])

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) behind tokens (B,) int64, which are kept."""
        hidden = self._read(tokens[:, None], self._cache, None)
        self.end += 1
        logits: Tensor = self.model.logits(hidden[:, -1])
        return logits

    def go_on(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Logits (B, L, V) behind each of tokens (B, L) int64, of which nothing is kept.

        Args:
            real: (B, L) bool, False behind the end of a row.
        """
        hidden = self._read(tokens.to(self.device), copy.deepcopy(self._cache), real.to(self.device))
        logits: Tensor = self.model.logits(hidden)
        return logits

    def _read(self, tokens: Tensor, cache: Any, real: Tensor | None) -> Tensor:
        positions = self._positions(self.end, self.end + tokens.shape[1])
        hidden: Tensor = self.model(tokens, seen=self._seen, positions=positions, valid=real, cache=cache)
        return hidden

    def _positions(self, start: int, end: int) -> Tensor | None:
        if not self._own_positions:
            return None
        index = torch.arange(start, end, device=self.device)[None]
        return (index - self._padding).clamp(0, self._last)


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

    Raises:
        UsageError: no token is asked for, or see `Sampler`.
    """
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens = {max_new_tokens} is not at least 1")
    sampler = Sampler(**sampling)
    with evaluating(model):
        columns = list(_columns(model, prompts, max_new_tokens, sampler, eos_id, stop_early))
    rows: list[list[int]] = torch.stack(columns, 1).tolist()
    return [row[: row.index(eos_id) + 1] if eos_id in row else row for row in rows]


def _columns(
    model: Any, prompts: Prompts, count: int, sampler: Sampler, eos_id: int | None, stop_early: bool
) -> Iterator[Tensor]:
    """The next token of every row, (B,) int64, again and again."""
    reading = Reading(model, prompts, count)
    logits = reading.logits
    ended = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    for left in reversed(range(count)):
        new = sampler(logits)
        if eos_id is not None:
            ended = ended | (new == eos_id)
        yield new
        if not left or (stop_early and eos_id is not None and bool(ended.all())):
            return
        logits = reading.step(new)


def questions_of(batch: dict[str, Tensor]) -> tuple[Prompts, list[list[int]]]:
    """What comes before the first supervised token of each row, and what is supervised from there on.

    An answer ends at the first gap. It is empty of a row without a label, and of one that asks nothing, as
    plain text does: no image, and nothing before what is supervised. Of a packed row it is the first sample
    that is asked, with its own images alone.
    """
    targets = batch["targets"].numpy()
    if "documents" in batch:
        documents = batch["documents"].numpy()
        targets = np.where(documents == documents[:, :1], targets, IGNORE)
    images = None
    if "present" in batch:
        images = {name: batch[name] for name in IMAGE_KEYS if name in batch}
        images["present"] = images["present"] & (images["image_documents"] == 0)
    asks = np.zeros(len(targets), dtype=bool)
    if images is not None:
        asks = (images["present"].any(1) | images["prompt"][:, 0]).numpy()
    lengths, answers = [], []
    for number, row in enumerate(targets):
        places = np.flatnonzero(row != IGNORE)
        start = int(places[0]) if len(places) else 0
        after = np.flatnonzero(row[start:] == IGNORE)
        end = start + int(after[0]) if len(after) else len(row)
        lengths.append(start + 1)
        answers.append(row[start:end].tolist() if start or asks[number] else [])
    return Prompts(tokens=batch["tokens"], lengths=lengths, images=images), answers
