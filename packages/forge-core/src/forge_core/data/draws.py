"""Random numbers of samples: a function of seed, source, epoch and sample, whoever reads it and when."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from forge_core.data.collate import stack
from forge_core.data.order import SampleOrder
from forge_core.data.source import Arrays
from forge_core.errors import DataError, ForgeError


def sample_generator(seed: int, source: str, *numbers: int) -> np.random.Generator:
    """A generator of one sample's own, the same in every process, unrelated for any two arguments.

    The core makes those that `DrawingSource.draw` gets. A stream makes its own, in `at` from `spec.seed`,
    `spec.name` and the position (and the part, where it is read in parts).

    Args:
        seed: of the order of samples, any integer.
        source: name of the source.
        numbers: which sample.
    """
    key = repr((int(seed), source, tuple(int(number) for number in numbers)))
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "big")))


@contextmanager
def global_generators(generator: np.random.Generator) -> Iterator[None]:
    """Inside, Python's, NumPy's and torch's global generators (of the CPU) draw what follows from
    `generator`; afterwards they are what they were. For libraries that take none; use it inside `draw`.

    Raises:
        DataError: called on a thread: the training process draws from the same generators meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        raise DataError(
            "the global random generators cannot be seeded for a sample on a thread",
            "read with data.num_workers = 1 or more, and start no threads that draw",
        )
    seeds = generator.integers(2**32, size=3).tolist()
    python, legacy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(seeds[0])
        np.random.seed(seeds[1])
        torch.default_generator.manual_seed(seeds[2])  # torch.manual_seed would seed accelerators as well
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(cpu)


def global_states() -> tuple[Any, ...]:
    """What Python's, NumPy's and torch's global generators (of the CPU) draw next, to be compared."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), rest, torch.get_rng_state().numpy().tobytes()


def draws(source: Any) -> bool:
    """Whether a source of samples by number is a `DrawingSource`."""
    return hasattr(source, "draw") and hasattr(source, "__len__")


@attrs.frozen(kw_only=True)
class DrawnSamples:
    """A `DrawingSource` as one step reads it.

    Attributes:
        source, name: the source. seed: of the order of samples.
        epochs: (R,) int64, of the samples that the step takes from it, in the order of its rows.
    """

    source: Any
    name: str
    seed: int
    epochs: NDArray[np.int64]

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Samples `indices` (R,) stacked to (R, ...).

        Raises:
            DataError: naming the source and the sample that cannot be read.
        """
        pairs = zip(indices.tolist(), self.epochs.tolist(), strict=True)
        return stack([self.sample(index, epoch) for index, epoch in pairs], indices)

    def sample(self, index: int, epoch: int) -> Any:
        """Sample `index` as it is in one epoch."""
        generator = sample_generator(self.seed, self.name, epoch, index)
        try:
            return self.source.draw(index, generator)
        except ForgeError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise DataError(f"source {self.name}: cannot read sample {index}: {what}") from error

    @property
    def blanks(self) -> Arrays:
        """See `BatchedSource.blanks`."""
        found: Arrays = getattr(self.source, "blanks", {})
        return found


def first_epoch(source: Any, indices: NDArray[np.int64], name: str, seed: int) -> Any:
    """`source` as it is read where each sample comes once, such as in an evaluation: always the same draws.

    Args:
        indices: (R,) int64, the samples that are read.
        name, seed: as `DrawnSamples` has them.
    """
    if not draws(source):
        return source
    return DrawnSamples(source=source, name=name, seed=seed, epochs=np.zeros_like(indices))


def epochs_of(
    order: SampleOrder, position: int, which: NDArray[np.int64], sources: Sequence[Any]
) -> NDArray[np.int64]:
    """How often each sample from `position` on came before: (R,) int64; 0 where it is of a stream.

    Args:
        which: (R,) int64, the source of each sample from `position` on, of all ranks.
        sources: by number.
    """
    epochs = np.zeros_like(which)
    drawn = order.drawn(position)
    for number in np.unique(which).tolist():
        if hasattr(sources[number], "__len__"):
            rows = np.flatnonzero(which == number)
            epochs[rows] = (drawn[order.names[number]] + np.arange(len(rows))) // len(sources[number])
    return epochs
