"""Random tokens, computed from the index of the sample: no memory, and the same on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forge_core.data.options import SyntheticOptions
from forge_core.data.packing import pack_windows
from forge_core.data.permute import draw, permutation_key
from forge_core.data.source import Arrays, SourceSpec
from forge_core.errors import DataError


class SyntheticTokens:
    """Samples of independent, uniform tokens; each sample is one document and has S targets.

    Args:
        samples: number of samples.
        seq_len: S.
        vocab_size: tokens are 0..vocab_size - 1.
        seed: of the tokens. split: each split has tokens of its own.
    """

    def __init__(
        self, samples: int, *, seq_len: int, vocab_size: int, seed: int, split: str = "train"
    ) -> None:
        self._samples, self._length, self._vocab_size = samples, seq_len, vocab_size
        self._key = permutation_key(seed, 0, f"synthetic/{split}")[0]
        self.max_token = vocab_size - 1
        self._offsets = np.arange(seq_len + 1, dtype=np.uint64)

    def __len__(self) -> int:
        return self._samples

    @property
    def fingerprint(self) -> str:
        return f"synthetic/{self._key:x}/{self._samples}/{self._length}/{self._vocab_size}"

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Samples `indices` (R,): tokens, targets, positions (R, S) int64."""
        numbers = indices.astype(np.uint64)[:, None] * np.uint64(self._length + 1) + self._offsets
        return pack_windows(draw(numbers, self._key, self._vocab_size), end=-1, keep_apart=False)

    def __getitem__(self, index: int) -> Arrays:
        """Sample `index`, each array (S,)."""
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        return {key: value[0] for key, value in self.batch(np.array([index], dtype=np.int64)).items()}


def build(spec: SourceSpec, options: SyntheticOptions) -> SyntheticTokens:
    """`n_samples` samples to train on and, beside them, `holdout` times as many (at least one) held out.

    Raises:
        DataError: `vocab_size` beyond the model's.
    """
    vocab_size = options.vocab_size or spec.vocab_size
    if vocab_size > spec.vocab_size:
        raise DataError(
            f"data.synthetic.vocab_size = {vocab_size} is beyond model.vocab_size = {spec.vocab_size}",
            "leave it out to draw from the model's vocabulary",
        )
    samples = options.n_samples
    if spec.split == "holdout":
        samples = max(1, round(samples * spec.holdout))
    return SyntheticTokens(
        samples, seq_len=spec.seq_len, vocab_size=vocab_size, seed=spec.seed, split=spec.split
    )
