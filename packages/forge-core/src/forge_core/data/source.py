"""What a data source is told when it is built, and what it may offer beyond `SampleSource`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from forge_core.config.config import Config
    from forge_core.data.tokenizer import Tokenizer

Arrays = dict[str, NDArray[Any]]
"""Rows by batch key: first axis is the row."""
Packing = Literal["concatenate", "best_fit"]


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
        packing: how documents become sequences: "concatenate" or "best_fit".
        cache_dir: folder for what a source prepares once, or None for the user's own cache folder.
        config: the resolved configuration of the run, for a source whose samples have to fit what the table
            of its plugin says of the model; None outside of a run.
        component: the target of a component by category and name, for a source with parts that are chosen by
            name; None outside of a run.
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
    packing: Packing = "concatenate"
    cache_dir: str | None = None
    config: Config | None = attrs.field(default=None, eq=False, repr=False)
    component: Callable[[str, str], Any] | None = attrs.field(default=None, eq=False, repr=False)


class BatchedSource(Protocol):
    """What a `SampleSource` may offer on top; each part is used where it is there."""

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Samples `indices` (R,) stacked: arrays (R, S) by batch key. Many times faster than one by one."""
        ...

    @property
    def max_token(self) -> int:
        """The largest token id in it. Sources that know it are checked once, the others at every batch."""
        ...

    @property
    def tokens_per_sample(self) -> float:
        """Mean tokens of a sample, for the weights of a mixture; by default S."""
        ...

    @property
    def blanks(self) -> Arrays:
        """By batch key what a sample of another source of a mixture gets that lacks the key; no row axis."""
        ...

    def documents_of(self, index: int) -> Sequence[str]:
        """What the documents in a sample are called, for `forge data inspect`."""
        ...

    def stretches_of(self, row: Mapping[str, NDArray[Any]], index: int) -> Sequence[tuple[int, int, str]]:
        """What of a sample is no text, for `forge data inspect`: first position, positions, what it is.

        Args:
            row: its arrays. index: its number; of a stream the one in the order of reading.
        """
        ...

    def close(self) -> None:
        """Release files and memory; called when the run ends."""
        ...


class DrawingSource(Protocol):
    """Samples by number that are drawn at random: crops, masks, negatives. A component may return it for a
    `SampleSource`; it may offer what `BatchedSource` has, but `batch` is not used.

    A sample is a function of seed, source, epoch and number, whatever the number of ranks and of
    `data.num_workers`, and also after a restart. Each epoch draws anew; an evaluation draws the same every
    time.
    """

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Changes when the samples change, other than by what is drawn."""
        ...

    def draw(self, index: int, generator: np.random.Generator) -> Mapping[str, Any]:
        """Sample `index` as numpy arrays by batch key; called instead of `__getitem__`, which may be missing.

        Args:
            generator: to draw from; nothing else may be drawn from. Libraries that draw from Python's,
                NumPy's or torch's global generators are called inside
                `forge_core.data.draws.global_generators(generator)`.
        """
        ...


@runtime_checkable
class SequentialSource(Protocol):
    """Samples that can only be read in their own order; a component may return it for a `SampleSource`.

    The order is a function of the source and its seed alone, so that every process that reads from the same
    position sees the same samples. A data rank reads all of them and keeps its own; with an attribute `parts`
    above 1 (the files of a data set), `at` takes two numbers more, `at(position, part, parts)` reads one of
    `parts` disjoint parts as a stream of its own, and ranks read only the parts that their samples are in.
    A stream that draws takes a `forge_core.data.draws.sample_generator` for each sample, by its position.
    """

    def at(self, position: int) -> Iterator[Arrays]:
        """Samples `position`, `position + 1`, ... of the run, each array (S,), without end: behind the last
        sample of an epoch comes the first of the next. Reading starts from the beginning of the stream, so
        that it takes O(position) time until the first sample.

        Raises:
            DataError: an epoch has no sample, or the stream fails.
        """
        ...

    def once(self) -> Iterator[Arrays]:
        """The samples of one epoch, each once; for evaluation."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when the samples or their order change, as far as that can be known without reading."""
        ...

    @property
    def max_token(self) -> int | None:
        """None: every batch is checked."""
        ...

    def close(self) -> None:
        """Release files and memory; called when the run ends."""
        ...
