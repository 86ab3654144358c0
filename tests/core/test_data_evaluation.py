"""Held-out samples: each once, on any number of ranks, in the same number of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from forge_core.data.evaluation import HoldoutSet
from forge_core.errors import DataError


class Numbers:
    fingerprint = "numbers"

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return {"tokens": np.array([index, index]), "targets": np.array([index, -100])}


def supervised(held: HoldoutSet) -> list[int]:
    """Samples that count, in the order seen."""
    return [int(row[0]) for batch in held for row in batch["targets"] if row[0] != -100]


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 31, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_each_sample_once_and_the_same_number_of_batches(n: int, ranks: int, batch_size: int) -> None:
    sets = [
        HoldoutSet("h", Numbers(n), batch_size=batch_size, data_rank=r, data_size=ranks) for r in range(ranks)
    ]
    assert sorted(i for held in sets for i in supervised(held)) == list(range(n))
    for held in sets:
        batches = list(held)
        assert len(batches) == len(held) == -(-n // (batch_size * ranks))
        assert all(1 <= len(batch["tokens"]) <= batch_size for batch in batches)


def test_one_rank_sees_the_samples_in_order_and_again() -> None:
    held = HoldoutSet("h", Numbers(7), batch_size=3)
    assert [batch["tokens"][:, 0].tolist() for batch in held] == [[0, 1, 2], [3, 4, 5], [6]]
    assert supervised(held) == supervised(held) == list(range(7))


def test_rank_without_samples_takes_part_and_counts_for_nothing() -> None:
    held = HoldoutSet("h", Numbers(1), batch_size=4, data_rank=1, data_size=2)
    (batch,) = held
    assert batch["targets"].tolist() == [[-100, -100]]
    assert batch["tokens"].shape == (1, 2)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_limit_takes_the_same_samples_spread_over_the_set_on_any_ranks(ranks: int) -> None:
    sets = [
        HoldoutSet("h", Numbers(100), batch_size=2, limit=8, data_rank=r, data_size=ranks)
        for r in range(ranks)
    ]
    assert sorted(i for held in sets for i in supervised(held)) == [0, 12, 25, 37, 50, 62, 75, 87]


def test_limit_beyond_the_set_repeats_nothing() -> None:
    assert supervised(HoldoutSet("h", Numbers(5), batch_size=2, limit=50)) == list(range(5))


def test_empty_set_and_ids_beyond_the_vocabulary() -> None:
    with pytest.raises(DataError, match="set h: 0 samples, batch 4"):
        HoldoutSet("h", Numbers(0), batch_size=4)
    with pytest.raises(DataError, match="token id 5 does not fit"):
        list(HoldoutSet("h", Numbers(6), batch_size=6, vocab_size=5))
