"""What the log is told of samples: how many of a kind, what is odd about all of them. Imports no torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from forge_core.data.source import SourceSpec
from forge_core.data.wording import counted
from forge_vlm.geometry import ImageShape

_log = logging.getLogger("forge.data")
NAMED = 3
"""Samples of a kind that are named."""
_TELL_EVERY, _LOOK_EVERY = 5.0, 1000
"""Seconds, and samples after which the clock is looked at."""


class Told:
    """Samples of one kind, counted, of which the first are named."""

    def __init__(self, count: int = 0, names: Sequence[str] = ()) -> None:
        self.count, self.names = count, list(names)

    def add(self, name: str) -> None:
        self.count += 1
        if self.count <= NAMED:
            self.names.append(name)

    def __str__(self) -> str:
        return ", ".join(self.names) + (", ..." if self.count > len(self.names) else "")


class Census:
    """Samples that are odd, by kind; `tell` says how many of `total`.

    Args:
        spec: of the source. too_long: what becomes of those that do not fit.
    """

    def __init__(self, spec: SourceSpec, too_long: str) -> None:
        self._spec, self.total = spec, 0
        how = "left out" if too_long == "drop" else "cut"
        self._kinds = {
            "cut": f"{how}, as they do not fit train.seq_len = {spec.seq_len}",
            "silent": "without a label, so that nothing is learnt from them",
            "wrong": "left out, as they are no samples",
        }
        self.told = {kind: Told() for kind in self._kinds}

    def add(self, sample: Any) -> None:
        """Count a sample, see `forge_vlm.data.rows.Sample`."""
        self.total += 1
        for kind, told in self.told.items():
            if getattr(sample, kind):
                told.add(sample.name)

    def tell(self) -> None:
        """What was counted, to the log."""
        for kind, what in self._kinds.items():
            told = self.told[kind]
            if told.count:
                samples = counted(self.total, "sample")
                _log.warning("%s: %d of %s %s (%s)", self._spec.name, told.count, samples, what, told)


class Progress:
    """Says how far it is, now and then."""

    def __init__(self, name: str, total: Callable[[], int] | None) -> None:
        self._name, self._total, self._at = name, total, time.monotonic()
        self._of = ""

    def __call__(self, done: int) -> None:
        if done % _LOOK_EVERY or time.monotonic() - self._at < _TELL_EVERY:
            return
        if self._total is not None:
            self._of, self._total = f" of {self._total():,}", None
        self._at = time.monotonic()
        _log.warning("%s: %s%s samples tokenised; they are remembered", self._name, f"{done:,}", self._of)


def tell_blind(name: str, origin: str, way: str) -> None:
    """Say that data for a model that sees has nothing to see, and the way to it."""
    _log.warning("%s: no picture in %s, so that only text is trained on; %s", name, origin, way)


def tell_alone(spec: SourceSpec, shape: ImageShape) -> None:
    """Say that packed samples stay alone where a sequence holds one image."""
    if shape.most == 1 and spec.split != "holdout":
        _log.warning(
            "%s: pack puts no two samples with images into one sequence while vlm.max_images = 1; "
            "raise vlm.max_images",
            spec.name,
        )
