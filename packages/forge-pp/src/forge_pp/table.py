"""`[pp]`. Imports no torch."""

from __future__ import annotations

from forge_core.config import Config, key, table
from forge_core.config.fields import evolve
from forge_core.config.tables import TrainConfig
from forge_pp.schedules import CSV, SCHEDULES, Schedule


@table
class PpConfig:
    """The model cut into stages that run one after another, each on ranks of its own."""

    size: int = key(1, ge=1, help="Ranks that a pipeline goes through; 1 leaves the model whole.")
    schedule: str = key(
        "1f1b",
        help="Order of forwards and backwards: gpipe, 1f1b, interleaved_1f1b, looped_bfs, "
        "interleaved_zero_bubble, zbv, dualpipev, or the path of a CSV file (a row a rank: 0F0, 0B0, ...). "
        "The micro-batches of an update are the schedule's.",
    )
    stages_per_rank: int | None = key(
        None, ge=1, help="Stages of a rank.", derived="1, or 2 for schedules of several stages a rank"
    )
    split: list[str] = key(
        factory=list,
        help="Names of the blocks that stages 1, 2, ... begin with; empty: stages of about equal cost.",
    )
    balance: str = key(
        "flops",
        choices=("flops", "parameters"),
        help="What stages share evenly, embedding and head included: work or parameters.",
    )

    def for_one_process(self) -> PpConfig:
        """The whole model on one rank."""
        return evolve(self, size=1)


def schedule_of(pp: PpConfig) -> Schedule | None:
    """The schedule by its name; None for a CSV file and for a name that does not exist."""
    return SCHEDULES.get(pp.schedule)


def is_file(pp: PpConfig) -> bool:
    """Whether the schedule comes from a CSV file."""
    return pp.schedule.endswith(CSV)


def stages_per_rank(pp: PpConfig) -> int:
    """Stages of a rank, resolved."""
    schedule = schedule_of(pp)
    return pp.stages_per_rank or (1 if schedule is None else schedule.stages)


def micro_batches(config: Config, world_size: int) -> int:
    """Micro-batches of an update on a data rank, as far as the tables say."""
    train = config[TrainConfig]
    if train.grad_accum_steps is not None or train.global_batch_size is None:
        return train.grad_accum_steps or 1
    from forge_core.config.tables import DistributedConfig

    sizes = config[DistributedConfig]
    data_ranks = max(1, world_size // (config[PpConfig].size * sizes.tp * sizes.cp))
    return max(1, train.global_batch_size // (train.batch_size * data_ranks))
