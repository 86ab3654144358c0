"""Data of the core: what does not go together, and the metrics of a mixture's sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forge_core.config.tables import DataConfig, EvalConfig
from forge_core.data.missing import missing_paths
from forge_core.errors import Problem
from forge_core.markers import hookimpl

if TYPE_CHECKING:
    from forge_core.config.config import Config
    from forge_core.contract import CheckpointExtra, Metric, Observer
    from forge_core.loop.session import TrainingSession

OF_FILES = ("text", "tokens", "jsonl", "parquet", "chat")
"""Sources of the core whose path names a file or a folder."""


@hookimpl
def forge_problems(config: Config) -> Iterator[Problem]:
    data, usual = config[DataConfig], DataConfig()  # a resolved configuration states defaults, too
    for name in ("source", "path") if data.mix else ():
        if getattr(data, name) != getattr(usual, name):
            yield Problem(
                f"data.{name}",
                "a mixture names its own sources",
                f"move it into [[data.mix]], or drop {name}",
            )
    if config[EvalConfig].sets and data.holdout not in (0.0, usual.holdout):
        yield Problem(
            "data.holdout",
            "nothing is held out where [[eval.sets]] says what to evaluate on",
            "drop one of the two",
        )
    yield from missing_paths(config, OF_FILES)


@hookimpl
def forge_observers(session: TrainingSession) -> list[Observer]:
    from forge_core.data.per_source import source_losses

    return list(source_losses(session))


@hookimpl
def forge_extra_metrics(session: TrainingSession) -> list[Metric]:
    from forge_core.data.per_source import source_losses

    return [metric for losses in source_losses(session) for metric in losses.metrics()]


@hookimpl
def forge_checkpoint_extras(session: TrainingSession) -> list[CheckpointExtra]:
    from forge_core.data.per_source import source_losses

    return [losses.extra() for losses in source_losses(session)]
