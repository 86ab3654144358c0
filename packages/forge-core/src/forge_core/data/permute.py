"""A shuffle that needs no list: a keyed permutation of 0..n-1, evaluated index by index.

A Feistel network over mixed radices (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
2002): an index is a pair (left, right) with left < a = ceil(sqrt(n)) and right < b = ceil(n / a); each round
adds a keyed function of one half to the other, modulo its radix, which is undone by subtraction, so every
round is a bijection. Indices that land in n..ab-1 go round again until they come back below n (cycle
walking). Only integer arithmetic modulo 2**64 is used, so an order is the same on every machine and under
every version of numpy.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROUNDS = 8
MASK = (1 << 64) - 1
LARGEST = 1 << 62
Key = tuple[int, ...]

_C1, _C2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NP_C1, _NP_C2 = np.uint64(_C1), np.uint64(_C2)
_S27, _S30, _S31, _S32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)


def permutation_key(seed: int, epoch: int, name: str = "") -> Key:
    """Round keys of one order: `ROUNDS` numbers below 2**64, unrelated for any two (seed, epoch, name)."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{name}".encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 well-mixed bits of each number, in place: SplitMix64's finaliser (Steele et al., OOPSLA 2014)."""
    x ^= x >> _S30
    x *= _NP_C1
    x ^= x >> _S27
    x *= _NP_C2
    x ^= x >> _S31
    return x


def draw(x: NDArray[np.uint64], key: int, below: int) -> NDArray[np.uint64]:
    """Pseudo-random numbers 0..below-1 (below <= 2**32), a pure function of each x and the key."""
    bits = mix(x + np.uint64(key))
    bits >>= _S32
    bits *= np.uint64(below)
    bits >>= _S32
    return bits


def _radices(n: int) -> tuple[int, int]:
    if not 1 <= n <= LARGEST:
        raise ValueError(f"a permutation needs 1 to 2**62 indices, not {n}")
    a = math.isqrt(n - 1) + 1
    return a, -(-n // a)


def _feistel(x: NDArray[np.uint64], a: int, b: int, key: Key) -> NDArray[np.uint64]:
    radix_a, radix_b = np.uint64(a), np.uint64(b)
    right, left = np.divmod(x, radix_a)
    for r in range(0, ROUNDS, 2):
        left = (left + draw(right, key[r], a)) % radix_a
        right = (right + draw(left, key[r + 1], b)) % radix_b
    right *= radix_a
    right += left
    return right


def permute(indices: ArrayLike, n: int, key: Key) -> NDArray[np.int64]:
    """Where each of `indices` (k,) goes under the permutation of 0..n-1 that belongs to `key`.

    Memory and time depend on k alone. `permute(np.arange(n), n, key)` holds every number of 0..n-1 once.

    Args:
        indices: (k,) integers in 0..n-1.
        n: length of the permutation, 1 to 2**62.
        key: from `permutation_key`.

    Returns:
        (k,) int64.

    Raises:
        ValueError: n out of bounds. IndexError: an index out of 0..n-1.
    """
    a, b = _radices(n)
    given: NDArray[Any] = np.atleast_1d(np.asarray(indices, dtype=np.int64))
    if given.size and (int(given.min()) < 0 or int(given.max()) >= n):
        raise IndexError(f"indices must lie in 0..{n - 1}")
    out = _feistel(given.astype(np.uint64), a, b, key)
    outside = np.flatnonzero(out >= np.uint64(n))
    while outside.size:
        out[outside] = _feistel(out[outside], a, b, key)
        outside = outside[out[outside] >= np.uint64(n)]
    return out.astype(np.int64)


def _draw_one(x: int, key: int, below: int) -> int:
    x = (x + key) & MASK
    x = ((x ^ (x >> 30)) * _C1) & MASK
    x = ((x ^ (x >> 27)) * _C2) & MASK
    x ^= x >> 31
    return ((x >> 32) * below) >> 32


def permute_one(index: int, n: int, key: Key) -> int:
    """`permute` of one index, in plain integers."""
    a, b = _radices(n)
    if not 0 <= index < n:
        raise IndexError(f"index {index} does not lie in 0..{n - 1}")
    while True:
        right, left = divmod(index, a)
        for r in range(0, ROUNDS, 2):
            left = (left + _draw_one(right, key[r], a)) % a
            right = (right + _draw_one(left, key[r + 1], b)) % b
        index = right * a + left
        if index < n:
            return index
