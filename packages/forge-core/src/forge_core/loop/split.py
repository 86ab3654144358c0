"""How the sequences of an update are split over ranks and micro-batches. Imports no torch."""

from __future__ import annotations

from forge_core.config.tables import TrainConfig
from forge_core.errors import ConfigError, Problem


def accumulation(train: TrainConfig, data_ranks: int) -> int:
    """Micro-batches of an update on each rank: as stated, or what gives `global_batch_size`.

    Raises:
        ConfigError: the sizes do not multiply.
    """
    if train.global_batch_size is None:
        return train.grad_accum_steps or 1
    steps, rest = divmod(train.global_batch_size, train.batch_size * data_ranks)
    if rest or steps == 0 or train.grad_accum_steps not in (None, steps):
        accumulate = train.grad_accum_steps or "?"
        sizes = f"batch_size {train.batch_size} x grad_accum_steps {accumulate} x data ranks {data_ranks}"
        raise ConfigError([Problem("train.global_batch_size", f"{train.global_batch_size} is not {sizes}")])
    return steps
