"""The keyed permutation: a bijection, stable, unrelated between epochs, and cheap at any length."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from forge_core.data.order import BLOCK, ShuffledOrder
from forge_core.data.permute import permutation_key, permute, permute_one

LENGTHS = [*range(1, 70), 97, 101, 255, 256, 257, 1000, 1009, 4095, 4096, 4097, 65537]


@pytest.mark.parametrize("seed", [0, 1, 2**70])
def test_each_index_occurs_once(seed: int) -> None:
    for n in LENGTHS:
        order = permute(np.arange(n), n, permutation_key(seed, 3))
        assert np.array_equal(np.sort(order), np.arange(n)), n


def test_one_index_equals_the_vectorised_form() -> None:
    for n in (1, 2, 3, 7, 64, 1009, 10**9, 10**12, 2**62):
        key = permutation_key(5, 1)
        asked = np.unique(np.linspace(0, n - 1, 50).astype(np.int64).clip(0, n - 1))
        assert permute(asked, n, key).tolist() == [permute_one(int(i), n, key) for i in asked]


def test_order_is_the_same_on_every_machine_and_version() -> None:
    assert permute(np.arange(10), 10, permutation_key(0, 0)).tolist() == [4, 3, 5, 9, 2, 7, 0, 1, 6, 8]
    assert permute([0, 1, 10**12 - 1], 10**12, permutation_key(42, 7)).tolist() == [
        869265807154,
        185400848683,
        156693629640,
    ]


def test_epochs_seeds_and_names_have_orders_of_their_own() -> None:
    keys = [permutation_key(s, e, name) for s in range(4) for e in range(8) for name in ("", "a")]
    orders = {tuple(permute(np.arange(20), 20, key).tolist()) for key in keys}
    assert len(orders) == len(keys)


def chi_square(counts: Counter[tuple[int, ...]], cells: int, draws: int) -> float:
    expected = draws / cells
    missing = (cells - len(counts)) * expected
    return missing + sum((count - expected) ** 2 / expected for count in counts.values())


def test_all_orders_of_four_are_equally_likely() -> None:
    draws = 12_000
    seen = Counter(tuple(permute(np.arange(4), 4, permutation_key(9, e)).tolist()) for e in range(draws))
    assert len(seen) == 24
    assert chi_square(seen, 24, draws) < 55  # 23 degrees of freedom: exceeded once in 5000 keys


def test_places_are_uniform_and_neighbours_unrelated() -> None:
    n, draws = 11, 6000
    pairs: Counter[tuple[int, ...]] = Counter()
    for epoch in range(draws):
        first, second = permute([0, 1], n, permutation_key(1, epoch)).tolist()
        pairs[(first, second)] += 1
    assert chi_square(pairs, n * (n - 1), draws) < 170  # 109 degrees of freedom


def test_long_order_is_spread_out() -> None:
    n = 10**6
    order = permute(np.arange(4000), n, permutation_key(3, 0))
    counts: Counter[tuple[int, ...]] = Counter((int(i),) for i in order * 20 // n)
    assert chi_square(counts, 20, 4000) < 50
    assert abs(np.corrcoef(np.arange(4000), order)[0, 1]) < 0.06


def test_out_of_range_is_refused() -> None:
    key = permutation_key(0, 0)
    for wrong in ([3], [-1]):
        with pytest.raises(IndexError, match=r"0\.\.2"):
            permute(wrong, 3, key)
    with pytest.raises(IndexError):
        permute_one(3, 3, key)
    with pytest.raises(ValueError, match="not 0"):
        permute([0], 0, key)


def test_a_billion_samples_take_neither_memory_nor_time() -> None:
    tracemalloc.start()
    began = time.perf_counter()
    order = ShuffledOrder(10**9, seed=1)
    _, first = order.at(0, 1000)
    _, later = order.at(10**9 - 500, 1000)  # across an epoch
    took = time.perf_counter() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(first)) == 1000
    assert len(np.unique(later[:500])) == 500
    assert peak < 10e6
    assert took < 1.0


def test_order_crosses_epochs_and_blocks_and_depends_on_the_position_alone() -> None:
    n = BLOCK + 10
    straight = ShuffledOrder(n, seed=4).at(0, 3 * n)[1]
    for epoch in range(3):
        assert np.array_equal(np.sort(straight[epoch * n : (epoch + 1) * n]), np.arange(n))
    assert not np.array_equal(straight[:n], straight[n : 2 * n])
    pieces, order, position = [], ShuffledOrder(n, seed=4), 0
    while position < 3 * n:
        count = min(1 + position % 777, 3 * n - position)
        pieces.append(order.at(position, count)[1])
        position += count
    assert np.array_equal(np.concatenate(pieces), straight)
