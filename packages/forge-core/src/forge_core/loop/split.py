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
    micro = train.batch_size * data_ranks
    steps, rest = divmod(train.global_batch_size, micro)
    sizes = f"batch_size {train.batch_size} x data ranks {data_ranks}"
    if rest or steps == 0:
        message = f"{train.global_batch_size} is not a multiple of {sizes} = {micro}"
        raise ConfigError([Problem("train.global_batch_size", message, "change one of the sizes")])
    if train.grad_accum_steps not in (None, steps):
        message = f"{train.global_batch_size} is not {sizes} x grad_accum_steps {train.grad_accum_steps}"
        hint = "leave grad_accum_steps out, and it follows"
        raise ConfigError([Problem("train.global_batch_size", message, hint)])
    return steps
