"""The tables of the core. Importing them imports no torch."""

from forge_core.config.tables.control import FreezeConfig, FreezeStage, GuardConfig
from forge_core.config.tables.data import DataConfig, MixConfig, PhaseConfig
from forge_core.config.tables.eval import EvalConfig, EvalSet
from forge_core.config.tables.launch import LaunchConfig
from forge_core.config.tables.model import ModelConfig, RopeScalingConfig
from forge_core.config.tables.optim import GroupConfig, LossConfig, OptimizerConfig, SchedulerConfig
from forge_core.config.tables.run import RunConfig
from forge_core.config.tables.seeing import DistributedConfig, MetricsConfig, ProfilingConfig
from forge_core.config.tables.train import TrainConfig

CORE_TABLES: dict[str, type] = {
    "run": RunConfig,
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "scheduler": SchedulerConfig,
    "loss": LossConfig,
    "guard": GuardConfig,
    "freeze": FreezeConfig,
    "eval": EvalConfig,
    "distributed": DistributedConfig,
    "metrics": MetricsConfig,
    "profiling": ProfilingConfig,
    "launch": LaunchConfig,
}
"""Every table of the core, in the order in which they are resolved and written."""

__all__ = [
    "CORE_TABLES",
    "DataConfig",
    "DistributedConfig",
    "EvalConfig",
    "EvalSet",
    "FreezeConfig",
    "FreezeStage",
    "GroupConfig",
    "GuardConfig",
    "LaunchConfig",
    "LossConfig",
    "MetricsConfig",
    "MixConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PhaseConfig",
    "ProfilingConfig",
    "RopeScalingConfig",
    "RunConfig",
    "SchedulerConfig",
    "TrainConfig",
]
