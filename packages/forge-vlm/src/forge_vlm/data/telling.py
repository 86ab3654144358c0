"""What the log is told of samples: how many of a kind, what is odd about all of them. Imports no torch."""

from __future__ import annotations

import logging

from forge_core.data.source import SourceSpec
from forge_vlm.geometry import ImageShape

_log = logging.getLogger("forge.data")
_NAMED = 3


class Told:
    """Samples of one kind, counted, of which the first are named."""

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []

    def add(self, name: str) -> None:
        self.count += 1
        if self.count <= _NAMED:
            self.names.append(name)

    def __str__(self) -> str:
        return ", ".join(self.names) + (", ..." if self.count > len(self.names) else "")


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
