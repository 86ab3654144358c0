"""Keys of encoders' options for the statistics of pixels. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge_core.config import Problem, key
from forge_vlm.geometry import Triple

HALF: Triple = (0.5, 0.5, 0.5)
CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)
"""Those of the pictures that CLIP was trained on (Radford et al. 2021)."""


def mean_key(values: Triple = HALF) -> Any:
    """The key `mean`."""
    return key(factory=lambda: list(values), help="Mean of each channel, from 0 to 1.")


def std_key(values: Triple = HALF) -> Any:
    """The key `std`."""
    return key(factory=lambda: list(values), gt=0, help="Standard deviation of each channel, from 0 to 1.")


def statistics_problems(options: Any) -> Iterator[Problem]:
    """Of `mean` and `std`, beside those of single numbers."""
    for name in ("mean", "std"):
        if len(getattr(options, name)) != 3:
            yield Problem(name, "needs three numbers, one a channel")


def statistics_of(options: Any) -> dict[str, Any]:
    """`mean` and `std` as a geometry has them."""
    (a, b, c), (d, e, f) = options.mean, options.std
    return {"mean": (a, b, c), "std": (d, e, f)}
