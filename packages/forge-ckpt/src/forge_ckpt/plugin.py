"""The plugin `checkpoint`: owns the table `[checkpoint]` and saves, keeps and loads checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from forge_ckpt.table import CheckpointConfig
from forge_core import hookimpl
from forge_core.contract import Component, Observer
from forge_core.data.wording import counted
from forge_core.errors import Problem
from forge_core.files import is_there

if TYPE_CHECKING:
    from forge_core.config.config import Config
    from forge_core.contract import Checkpointer, InitialWeights
    from forge_core.loop.session import TrainingSession

forge_api = 1

NO_PLACE = re.compile(r"(?!memory://)[a-z][a-z0-9+]+:(/*$|/?[^/])")
"""An address without anything behind its kind, or with a slash missing, which would be a folder here."""


@hookimpl
def forge_tables() -> type:
    """`[checkpoint]`."""
    return CheckpointConfig


@hookimpl
def forge_components() -> Iterable[Component]:
    """Strategies of when to save."""
    return [
        Component(
            category="save_strategy",
            name="power2",
            target="forge_ckpt.schedule:power2",
            help="at offsets 0, 1, 2, 4, 8, ... of the window",
        )
    ]


@hookimpl
def forge_problems(config: Config, world_size: int) -> Iterable[Problem]:
    """What the table does not say by itself."""
    return list(_problems(config[CheckpointConfig], config))


def _problems(table: CheckpointConfig, config: Config) -> Iterator[Problem]:
    evaluation = config.get("eval")
    if table.keep_best and not evaluation.interval and not evaluation.at_end:
        yield Problem("checkpoint.keep_best", "nothing is evaluated", "set eval.interval")
    if table.keep_best and evaluation.interval and table.interval and table.interval % evaluation.interval:
        every = counted(table.interval, "update")
        text = f"saves every {every} do not meet evaluations every {evaluation.interval}"
        yield Problem("checkpoint.keep_best", text, "make interval a multiple of eval.interval")
    if table.url is not None and (not table.url or NO_PLACE.match(table.url)):
        text = f"{table.url!r} names no place"
        yield Problem("checkpoint.url", text, "a folder, or an address such as s3://bucket/place")
    yield from _missing(table, config)


def _missing(table: CheckpointConfig, config: Config) -> Iterator[Problem]:
    """Folders that are named and not there; addresses are asked when the run starts."""
    named = {"model.init_from": config.get("model").init_from}
    if table.resume not in ("auto", "", True, False):
        named["checkpoint.resume"] = str(table.resume)
    for key, place in named.items():
        if place is not None and "://" not in place and not is_there(place):
            yield Problem(key, f"there is nothing at {place}", at_start=True)


@hookimpl
def forge_build_initial_weights(session: TrainingSession) -> InitialWeights:
    """Weights of a Hugging Face folder, an imported folder or a checkpoint, for `model.init_from`."""
    from forge_ckpt.hf.start import start_from

    return lambda model: start_from(session, model)


@hookimpl
def forge_build_checkpointer(session: TrainingSession) -> Checkpointer:
    """The checkpointer of the run."""
    from forge_ckpt.checkpointer import RunCheckpointer

    return RunCheckpointer(session, session.config[CheckpointConfig])


class Evaluations(Observer):
    """Hands evaluations to the checkpointer, which may rank by them."""

    def eval_end(self, session: TrainingSession, step: int, metrics: Mapping[str, float]) -> None:
        keeper: Any = session.checkpointer
        if hasattr(keeper, "evaluated"):
            keeper.evaluated(step, metrics)


@hookimpl
def forge_observers(session: TrainingSession) -> Iterable[Observer]:
    """What listens to evaluations."""
    return [Evaluations()] if session.config[CheckpointConfig].keep_best else []
