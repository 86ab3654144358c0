"""What a data source is told when it is built, and what it may offer beyond `SampleSource`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from forge_core.data.tokenizer import Tokenizer

Arrays = dict[str, NDArray[Any]]
"""Rows by batch key: first axis is the row."""


@attrs.frozen(kw_only=True)
class SourceSpec:
    """What a component of category "data_source" is built from: `target(spec, options) -> SampleSource`.

    Attributes:
        name: of the source in messages and metrics.
        path: file or folder, or None for the source's own default.
        split: "train", "holdout" (the part kept for evaluation) or "all" of it.
        seq_len: S, tokens of a sample.
        tokenizer: what turns text into ids.
        vocab_size: rows of the model's embedding; every id must be below.
        pack: documents of a sequence are kept apart.
        holdout: share kept for evaluation, 0 <= holdout < 1.
        seed: of the order of samples; sources that invent their samples use it too.
    """

    name: str
    path: str | None
    split: Literal["train", "holdout", "all"]
    seq_len: int
    tokenizer: Tokenizer
    vocab_size: int
    pack: bool
    holdout: float
    seed: int


class BatchedSource(Protocol):
    """What a `SampleSource` may offer on top; each part is used where it is there."""

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Samples `indices` (R,) stacked: arrays (R, S) by batch key. Many times faster than one by one."""
        ...

    @property
    def max_token(self) -> int:
        """The largest token id in it. Sources that know it are checked once, the others at every batch."""
        ...

    def close(self) -> None:
        """Release files and memory; called when the run ends."""
        ...
