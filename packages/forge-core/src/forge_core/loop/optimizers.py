"""The core's one optimizer, "main", with its groups and schedule, from `[optimizer]` and `[scheduler]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_core.config.tables import DataConfig, OptimizerConfig, SchedulerConfig, TrainConfig
from forge_core.contract import NamedOptimizer
from forge_core.loop.naming import global_name
from forge_core.model import parameter_roles
from forge_core.optim import build_optimizer, parameter_groups, phased

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession


def build_main_optimizer(session: TrainingSession) -> NamedOptimizer:
    """The optimizer over every parameter that ever trains, and its schedule."""
    config, schedule = session.config[OptimizerConfig], session.config[SchedulerConfig]
    roles = {global_name(name): role for name, role in parameter_roles(session.model).items()}
    aliases = {name: alias.patterns for name, alias in session.freeze.aliases.items()}
    mine, elsewhere = session.freeze.ever_trainable(), session.freeze.elsewhere
    groups = parameter_groups(mine.items(), roles, config, aliases, elsewhere)
    options, builder = session.options("optimizer", config.name), session.component("optimizer", config.name)
    optimizer = build_optimizer(config, options, groups, builder)
    factor = session.component("schedule", schedule.name)(
        schedule, session.options("scheduler", schedule.name), session.config[TrainConfig].max_steps
    )
    phases = [(phase.start_step, phase.lr_scale) for phase in session.config[DataConfig].phases]
    return NamedOptimizer(optimizer=optimizer, schedule=phased(factor, phases) if phases else factor)
