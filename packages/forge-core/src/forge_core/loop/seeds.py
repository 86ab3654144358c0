"""Seeds of the random generators that code may draw from without asking: Python's, NumPy's and torch's."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from forge_core.distributed.mesh import Mesh


def derive_seed(seed: int, *parts: int | str) -> int:
    """A seed for one purpose, in [0, 2**32): independent of those for other `parts`, the same on every
    machine."""
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def process_seed(seed: int, data_rank: int) -> int:
    """Seed of a process: ranks that read different samples draw different numbers."""
    return derive_seed(seed, "process", data_rank)


def seed_process(seed: int, mesh: Mesh) -> None:
    """Seed the generators of this process, once, before anything is built.

    Ranks that read the same samples draw the same numbers, as one process would. Where such ranks hold parts
    of one activation, `forge_core.model.dropout` draws the mask of the whole; other code that draws for a
    part does so inside `apart`. Ranks with other parameters altogether (stages) draw from torch what no other
    stage does.
    """
    base = process_seed(seed, mesh.data_rank)
    seed_generators(base)
    stages = [a.name for a in mesh.axes if a.params_differ and a.carved_from is None and mesh.rank(a.name)]
    if stages:
        torch.manual_seed(derive_seed(base, *(f"{name}={mesh.rank(name)}" for name in stages)))


@contextmanager
def apart(rank: int) -> Iterator[None]:
    """Inside, torch draws numbers of this `rank`'s own: for activations of which each rank holds a part.

    Ranks that otherwise draw alike (of a tensor parallel group) call it together; afterwards they draw alike
    again. What is drawn inside depends on the CPU generator at entry and on nothing else: a recomputed
    forward draws the same.

    Args:
        rank: among those that hold the other parts.
    """
    base = int(torch.randint(2**62, (), device="cpu"))
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(derive_seed(base, rank))
        yield


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
