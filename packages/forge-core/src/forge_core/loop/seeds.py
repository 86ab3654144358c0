"""Seeds of the random generators that code may draw from without asking: Python's, NumPy's and torch's."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def derive_seed(seed: int, *parts: int | str) -> int:
    """A seed for one purpose, in [0, 2**32): independent of those for other `parts`, the same on every
    machine."""
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def process_seed(seed: int, data_rank: int) -> int:
    """Seed of a process: ranks that read different samples draw different numbers."""
    return derive_seed(seed, "process", data_rank)


def worker_seed(seed: int, epoch: int, data_rank: int, worker: int) -> int:
    """Seed of a process that reads samples: none draws what another does, nor what it drew an epoch
    before."""
    return derive_seed(seed, "worker", epoch, data_rank, worker)


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators. Forked processes would otherwise share their
    state."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
