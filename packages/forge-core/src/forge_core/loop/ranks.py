"""Where this process stands among all processes of the run."""

from __future__ import annotations

import os

import attrs

from forge_core.errors import ForgeError


@attrs.frozen(kw_only=True)
class Ranks:
    """Coordinates of this process.

    Attributes:
        rank, world_size: among all processes.
        data_rank, data_size: among the processes that read different samples.
    """

    rank: int = 0
    world_size: int = 1
    data_rank: int = 0
    data_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world_size_from_environment() -> int:
    """Processes that a launcher started, from WORLD_SIZE; 1 without a launcher."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise ForgeError(f"WORLD_SIZE={text!r} is not a number of processes")
    return int(text)


def find_ranks() -> Ranks:
    """Ranks of this process. This release trains in one process."""
    world = world_size_from_environment()
    if world > 1:
        raise ForgeError(
            f"{world} processes were started, but this release trains in one", "start one process"
        )
    return Ranks()
