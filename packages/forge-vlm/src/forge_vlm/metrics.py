"""What a run saw: images, labels, and samples without any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from forge_core.contract import Metric, Observer, StepResult
from forge_core.errors import DataError
from forge_vlm.flops import piece_of
from forge_vlm.geometry import ImageShape, shape_of

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core import TrainingSession

PATIENCE = 5
"""Updates without a supervised token, from the first one on, after which a run ends."""

_MADE: dict[int, SeenCounts]


class SeenCounts(Observer):
    """Adds up the counts of steps, which are those of all ranks, until they are logged.

    Args:
        tokens_apart: where visual tokens take no place in the sequence, by the name of a count how many one
            of it is.

    Raises in `step_end` where nothing was supervised from the beginning: DataError, on all ranks alike.
    """

    def __init__(self, tokens_apart: Mapping[str, float] | None = None) -> None:
        self.tokens_apart = tokens_apart or {}
        self.sums: dict[str, int] = {}
        self.trained = 0
        self.idle = 0

    def step_end(self, session: TrainingSession, step: int, result: StepResult) -> None:
        counts = result.counts
        for name, value in counts.items():
            self.sums[name] = self.sums.get(name, 0) + value
        for name, each in self.tokens_apart.items():
            self.sums["visual_tokens"] = self.sums.get("visual_tokens", 0) + round(each * counts[name])
        self.trained += counts["tokens"]
        self.idle = self.idle + 1 if not self.trained else 0
        if self.idle >= PATIENCE:
            raise DataError(
                f"no supervised tokens in the first {self.idle} updates: nothing is learnt",
                "look at the samples with forge data inspect; the answers may be cut off or not be there",
            )

    def read(self, name: str) -> Tensor | None:
        """A sum since the last log."""
        if name not in self.sums:
            return None
        return torch.tensor(float(self.sums.pop(name)))

    def share(self, name: str, of: str) -> Tensor | None:
        """A sum over another, which nothing else reads."""
        if name not in self.sums or not self.sums.get(of):
            return None
        return torch.tensor(self.sums.pop(name) / self.sums.pop(of))

    def rate(self, name: str, seconds: float) -> Tensor | None:
        """A sum a second."""
        return None if name not in self.sums else torch.tensor(self.sums.pop(name) / max(seconds, 1e-9))


def counts_of(session: TrainingSession) -> SeenCounts:
    """The counts of this session, made when first asked for."""
    key = id(session)
    if key not in _MADE:
        _MADE[key] = SeenCounts(_apart(shape_of(session.config)))
        session.exit_stack.callback(_MADE.pop, key, None)
    return _MADE[key]


_MADE = {}


def _apart(shape: ImageShape) -> dict[str, float]:
    """`SeenCounts.tokens_apart`."""
    if shape.places:
        return {}
    name, count = piece_of(shape)
    return {name: shape.tokens / count}


def all_metrics(session: TrainingSession) -> list[Metric]:
    """`data/text_tokens_trained`, `data/samples_without_label`, `data/images`, what is wrong with samples
    (`forge_vlm.data.rows.COUNTED`), `train/visual_tokens_per_sec`; counts are those since the last log."""
    counts = counts_of(session)

    def total() -> Tensor:
        return torch.tensor(float(counts.trained))

    def rate() -> Tensor | None:
        return counts.rate("visual_tokens", session.metrics.meter.busy_sec)

    def measured(name: str, read: Any) -> Metric:
        return Metric(name=name, op="max", read=read)

    return [
        measured("data/text_tokens_trained", total),
        measured("data/samples_without_label", lambda: counts.share("unsupervised", "sequences")),
        measured("data/images", lambda: counts.read("images")),
        measured("data/unreadable_images", lambda: counts.read("unreadable")),
        measured("data/unreadable_videos", lambda: counts.read("unreadable_videos")),
        measured("data/missing_images", lambda: counts.read("missing")),
        measured("data/samples_cut", lambda: counts.read("cut")),
        measured("data/samples_left_out", lambda: counts.read("left_out")),
        measured("train/visual_tokens_per_sec", rate),
    ]
