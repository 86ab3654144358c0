"""How the core trains: optimizer, step, mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forge_core.config.tables import DistributedConfig, GuardConfig, TrainConfig
from forge_core.contract.parts import CheckpointExtra, MeshAxis, NamedOptimizer
from forge_core.errors import Problem
from forge_core.markers import hookimpl

if TYPE_CHECKING:
    from forge_core.config.config import Config
    from forge_core.contract import StepFn
    from forge_core.loop.session import TrainingSession


@hookimpl
def forge_problems(config: Config, world_size: int) -> Iterator[Problem]:
    if config[TrainConfig].dtype == "fp16" and config[GuardConfig].action != "skip":
        message = "under train.dtype = fp16 gradients overflow now and then, and that is no reason to end"
        yield Problem("guard.action", message, 'use "skip", or train.dtype = "bf16"')


@hookimpl
def forge_mesh_axes(config: Config) -> list[MeshAxis]:
    sizes = config[DistributedConfig]
    return [
        MeshAxis(name="dp_replicate", size=sizes.dp_replicate, place=20, data_differs=True),
        MeshAxis(name="dp_shard", size=sizes.dp_shard, place=30, data_differs=True),
        MeshAxis(name="cp", size=sizes.cp, place=40, loss_differs=True),
        MeshAxis(name="tp", size=sizes.tp, place=50),
    ]


@hookimpl(trylast=True)
def forge_build_optimizers(session: TrainingSession) -> dict[str, NamedOptimizer]:
    from forge_core.loop.optimizers import build_main_optimizer

    return {"main": build_main_optimizer(session)}


@hookimpl
def forge_checkpoint_extras(session: TrainingSession) -> list[CheckpointExtra]:
    scaler = session.scaler
    if scaler is None:
        return []
    return [
        CheckpointExtra(
            name="loss_scaler",
            version=1,
            state_dict=scaler.state_dict,
            load_state_dict=scaler.load_state_dict,
        )
    ]


@hookimpl(trylast=True)
def forge_build_step_fn() -> StepFn:
    from forge_core.loop.accumulate import AccumulateStep

    return AccumulateStep()
