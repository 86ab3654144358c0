"""What does not go together under `[pp]`, in words. Imports no torch.

Everything refused here is what torch's schedules cannot run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from forge_core.config import Config, Problem
from forge_core.config.tables import DistributedConfig, ModelConfig, TrainConfig
from forge_core.data.wording import counted
from forge_core.errors import ForgeError
from forge_core.files import user_path
from forge_pp.orders import read_csv
from forge_pp.schedules import SCHEDULES, Schedule, V, count_problems
from forge_pp.simulate import simulate
from forge_pp.table import PpConfig, is_file, micro_batches, schedule_of, stages_per_rank


def all_problems(config: Config, world_size: int) -> Iterator[Problem]:
    """Every problem of the table with the rest of the configuration."""
    pp = config[PpConfig]
    schedule = schedule_of(pp)
    if is_file(pp):
        yield from _file_problems(config, pp, world_size)
    elif schedule is None:
        yield _unknown(pp.schedule)
        return
    if pp.size == 1:
        return
    if schedule is not None:
        yield from _schedule_problems(config, pp, schedule, world_size)
    yield from _split_problems(config, pp)


def _unknown(name: str) -> Problem:
    near = difflib.get_close_matches(name.lower(), SCHEDULES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(SCHEDULES)}, or a .csv file"
    return Problem("pp.schedule", f"there is no schedule {name!r}", hint)


def _schedule_problems(
    config: Config, pp: PpConfig, schedule: Schedule, world_size: int
) -> Iterator[Problem]:
    each = stages_per_rank(pp)
    if schedule.fixed and each != schedule.stages:
        message = (
            f"{schedule.name} has {schedule.stages} stage{'s' * (schedule.stages > 1)} a rank, not {each}"
        )
        yield Problem("pp.stages_per_rank", message, "leave it out, or choose another schedule")
        return
    if schedule.style == V and config[ModelConfig].tie_embeddings and _data_ranks(config, world_size) > 1:
        message = (
            f"{schedule.name} has both ends of the model on one rank, and FSDP2 cannot shard a parameter "
            "that two stages share"
        )
        yield Problem("model.tie_embeddings", message, "set it to false, or choose another schedule")
    count = micro_batches(config, world_size)
    for message in count_problems(schedule, pp.size, pp.size * each, count):
        yield Problem("pp.schedule", message, "change train.grad_accum_steps, or choose another schedule")
    if schedule.splits_backward and config[TrainConfig].activation_checkpointing == "selective":
        message = f"{schedule.name} takes backwards apart, and torch recomputes selectively only once"
        yield Problem(
            "train.activation_checkpointing", message, 'set it to "full", or choose another schedule'
        )


def _data_ranks(config: Config, world_size: int) -> int:
    sizes = config[DistributedConfig]
    return world_size // (config[PpConfig].size * sizes.tp)


def _split_problems(config: Config, pp: PpConfig) -> Iterator[Problem]:
    stages, layers = pp.size * stages_per_rank(pp), config[ModelConfig].n_layers
    if stages > layers:
        message = f"{stages} stages are more than model.n_layers = {layers}"
        yield Problem("pp.size", message, "fewer stages, or more layers")
    elif pp.split and len(pp.split) != stages - 1:
        message = f"names where {counted(len(pp.split) + 1, 'stage')} begin, and there are {stages}"
        yield Problem("pp.split", message, f"name the blocks that stages 1 to {stages - 1} begin with")


def _file_problems(config: Config, pp: PpConfig, world_size: int) -> Iterator[Problem]:
    if not user_path(pp.schedule).is_file():
        yield Problem("pp.schedule", f"there is no file {pp.schedule}")
        return
    try:
        order = read_csv(user_path(pp.schedule))
    except ForgeError as error:
        yield Problem("pp.schedule", str(error))
        return
    stages, count = pp.size * stages_per_rank(pp), micro_batches(config, world_size)
    found = list(order.problems(pp.size, stages, count))
    if not found:
        try:
            simulate(order)
        except ForgeError as error:
            found.append(error.message)
    for problem in found:
        yield Problem("pp.schedule", f"{pp.schedule}: {problem}")
