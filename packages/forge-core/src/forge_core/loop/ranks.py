"""Where this process stands among all processes of the run."""

from __future__ import annotations

import attrs

from forge_core.distributed.environment import world_size_from_environment

__all__ = ["Ranks", "world_size_from_environment"]


@attrs.frozen(kw_only=True)
class Ranks:
    """Coordinates of this process.

    Attributes:
        rank, world_size: among all processes. local_rank: among those of this machine.
        data_rank, data_size: among the processes that read different samples.
    """

    rank: int = 0
    world_size: int = 1
    data_rank: int = 0
    data_size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0
