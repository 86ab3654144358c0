"""From a configuration to a session that is ready to train: every hook is called here, once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from forge_core.config.config import Config
from forge_core.config.tables import (
    DistributedConfig,
    FreezeConfig,
    GuardConfig,
    ProfilingConfig,
    RunConfig,
    TrainConfig,
)
from forge_core.contract import PHASES, StepFn
from forge_core.contract.runtime import events_of
from forge_core.data.per_source import count_sources
from forge_core.distributed.control import Control
from forge_core.distributed.environment import Environment
from forge_core.distributed.fingerprint import compare_plans, compare_settings
from forge_core.distributed.mesh import Mesh
from forge_core.distributed.process_group import Processes, find_processes, join
from forge_core.errors import ConfigError, PluginError, Problem
from forge_core.loop.accumulate import forward_only
from forge_core.loop.clip import GlobalNorm
from forge_core.loop.device import choose_device, choose_dtypes
from forge_core.loop.flops import matrix_weights
from forge_core.loop.folder import RunFolder
from forge_core.loop.freeze import Freeze
from forge_core.loop.guard import Guard
from forge_core.loop.incidents import RecordedStream
from forge_core.loop.naming import named_parameters
from forge_core.loop.ranks import Ranks
from forge_core.loop.scaler import LossScaler
from forge_core.loop.seeds import seed_process
from forge_core.loop.session import TrainingSession
from forge_core.loop.signals import StopSignal
from forge_core.loop.split import accumulation
from forge_core.loop.transforms import added_and_moved, apply_transforms
from forge_core.loss.attached import AttachedLosses
from forge_core.plugins import CORE, Contribution, Plugins, attributed
from forge_core.plugins.plan import Plan

DRY_PHASES = ("modify",)


class Builder:
    """Calls hooks for a session and remembers every contribution for the plan."""

    def __init__(self, session: TrainingSession) -> None:
        self.session = session
        self.contributions = session.contributions

    def one(self, hook: str, **arguments: Any) -> Any:
        """The one answer to a `forge_build_*` hook. PluginError where somebody has to answer and nobody
        does."""
        value = self.optional(hook, **arguments)
        if value is None:
            raise PluginError(f"nobody answers {hook}", "name a plugin that does, by its table")
        return value

    def optional(self, hook: str, **arguments: Any) -> Any:
        """The one answer to a `forge_build_*` hook, or None if all decline."""
        session = self.session
        answer = session.plugins.choose(hook, session.config[RunConfig].choose, session=session, **arguments)
        if answer is None:
            return None
        self.contributions.append(answer)
        return answer.value

    def many(self, hook: str, **arguments: Any) -> list[Contribution]:
        """All answers to a plural hook, in order."""
        found = self.session.plugins.collect(hook, session=self.session, **arguments)
        self.contributions += found
        return found

    def functions(self, hook: str, **arguments: Any) -> tuple[Any, ...]:
        """Contributed functions that run in the loop; what they raise names their plugin."""
        return tuple(attributed(c, c.value) for c in self.many(hook, **arguments))


def new_session(
    config: Config,
    plugins: Plugins,
    exit_stack: ExitStack,
    *,
    ranks: Ranks | None = None,
    run: RunFolder | None = None,
) -> TrainingSession:
    """A session with nothing built yet: what hooks see at first. Meets the other processes of the run.

    Args:
        config, plugins: what to run.
        exit_stack: closed by the caller when the run ends.
        ranks: place among processes that are not there (a run that is only looked at); by default what a
            launcher says.
        run: the run folder; by default the one that the configuration names.
    """
    train, settings = config[TrainConfig], config[RunConfig]
    plugins.activate(config.plugins)
    axes = plugins.collect("forge_mesh_axes", config=config)
    place = find_processes() if ranks is None else Environment(rank=ranks.rank, world_size=ranks.world_size)
    device = choose_device(train.device, place.local_rank if place.world_size > 1 else None)
    layout = Mesh(
        [c.value for c in axes],
        rank=place.rank,
        world_size=place.world_size,
        device_type=device.type,
        connected=ranks is None,
    )  # refuses what does not fit before anybody waits for anybody
    processes = Processes(place) if ranks is not None else join(place, device, config[DistributedConfig])
    compute, parameters = choose_dtypes(train.dtype, device)
    session = TrainingSession(
        config=config,
        plugins=plugins,
        ranks=Ranks(
            rank=place.rank,
            world_size=place.world_size,
            local_rank=place.local_rank,
            data_rank=layout.data_rank,
            data_size=layout.data_size,
        ),
        device=device,
        compute_dtype=compute,
        param_dtype=parameters,
        run=run or RunFolder.of(settings.dir, settings.name),
        exit_stack=exit_stack,
        mesh_axes=layout.axes,
        mesh=layout,
        processes=processes,
        contributions=axes,
    )
    session.stop = StopSignal(settings.save_deadline, shared=layout.connected)
    if layout.connected:
        connect(session)
    session.grad_accum_steps = accumulation(train, layout.data_size)
    return session


def connect(session: TrainingSession) -> None:
    """What several processes need besides: the control reduction, the watch, one run folder for all."""
    session.watch = session.processes.watch
    session.control = Control(session.mesh, session.stop)
    folder = json.loads(session.control.same(json.dumps([session.run.name, str(session.run.path)])))
    session.run = attrs.evolve(session.run, name=folder[0], path=Path(folder[1]))


def build_session(session: TrainingSession, *, dry: bool = False) -> TrainingSession:
    """Build everything, in the order of the hooks. The session is returned for convenience.

    Args:
        dry: build to be looked at, not to be run: the model stays on the meta device, and of its transforms
            only those that change modules are applied. All are listed in the plan.
    """
    if session.control is not None:
        compare_settings(session, session.control)
    seed_process(session.config[TrainConfig].seed, session.mesh)
    if session.config[RunConfig].deterministic:
        torch.use_deterministic_algorithms(True)
    builder = Builder(session)
    session.data = session.exit_stack.enter_context(builder.one("forge_build_data"))
    session.stream = session.data.train
    if session.config[GuardConfig].incidents:
        session.stream = RecordedStream(session.stream)
    _build_model(builder, DRY_PHASES if dry else PHASES)
    _build_runtime(builder)
    session.plan = Plan.of(builder.contributions)
    session.contributions = []
    if session.control is not None:
        compare_plans(session, session.control)
        limit = session.config[DistributedConfig].start_timeout
        session.processes.set_timeout(limit, session.control.group)
    return session


def _build_model(builder: Builder, phases: Sequence[str]) -> None:
    session = builder.session
    with torch.device("meta"):
        decoder: nn.Module = builder.one("forge_build_decoder")
        model: nn.Module = builder.one("forge_build_model", decoder=decoder)
    session.model = model
    session.attached = AttachedLosses(session.device)
    transforms = session.plugins.collect("forge_model_transforms", session=session)
    before = named_parameters(model)
    changed, ordered = apply_transforms(model, transforms, [p for p in phases if p == "modify"])
    session.added, session.moved = added_and_moved(before, named_parameters(changed))
    session.matrices = matrix_weights(changed)  # as long as every rank has all of them
    session.model, _ = apply_transforms(changed, transforms, [p for p in phases if p != "modify"])
    builder.contributions += ordered
    with torch.device("meta") if "materialise" not in phases else nullcontext():
        session.auxiliary_models = {c.value[0]: c.value[1] for c in builder.many("forge_auxiliary_models")}
    aliases = [c.value for c in builder.many("forge_module_aliases")]
    elsewhere = getattr(session.model, "whole_names", ())
    session.freeze = Freeze(session.config[FreezeConfig], named_parameters(session.model), aliases, elsewhere)


def _build_runtime(builder: Builder) -> None:
    session = builder.session
    model = session.model
    world = session.ranks.world_size
    session.guard = Guard(session.config[GuardConfig], session.device, together=world > 1)
    session.global_norm = GlobalNorm(model, session.mesh, world_size=world if session.control else 1)
    if session.compute_dtype is torch.float16:
        session.scaler = LossScaler(session.device)
    session.optimizers = builder.one("forge_build_optimizers", model=model)
    terms = builder.many("forge_extra_losses", model=model)
    session.loss_terms = tuple(evolve_term(c) for c in terms)
    session.forward = count_sources(session, builder.one("forge_build_forward", model=model))
    session.step_fn = select_step_fn(builder)
    session.before_updates = builder.functions("forge_before_updates", model=model)
    session.after_updates = builder.functions("forge_after_updates", model=model)
    session.evaluators = {c.value[0]: attributed(c, c.value[1]) for c in builder.many("forge_evaluators")}
    session.generator = builder.optional("forge_build_generator")
    extras: dict[str, list[Any]] = {}
    for c in builder.many("forge_checkpoint_extras"):
        extras.setdefault(c.plugin, []).append(c.value)
    session.checkpoint_extras = extras
    session.checkpointer = builder.optional("forge_build_checkpointer")
    if session.checkpointer is None and session.config[GuardConfig].action == "rollback":
        hint = "add the table of a plugin that keeps checkpoints, or use skip"
        raise ConfigError(
            [Problem("guard.action", "rollback needs checkpoints, and nothing here keeps any", hint)]
        )
    observers = builder.many("forge_observers")
    session.events = events_of([c.value for c in observers], [partial(attributed, c) for c in observers])
    measured = builder.many("forge_extra_metrics", model=model)
    _build_seeing(session, measured)


def select_step_fn(builder: Builder) -> StepFn:
    """The one step function of the run: a plugin's, or the core's, which accumulates over micro-batches."""
    step_fn: StepFn = builder.one("forge_build_step_fn")
    contribution = builder.contributions[-1]
    if contribution.plugin == CORE:
        return step_fn
    return AttributedStep(
        train=attributed(contribution, step_fn.train),
        evaluate=attributed(contribution, step_fn.evaluate),
        forward_only=attributed(contribution, getattr(step_fn, "forward_only", forward_only)),
    )


@attrs.frozen(kw_only=True)
class AttributedStep:
    """A plugin's step function that names its plugin on errors."""

    train: Any
    evaluate: Any
    forward_only: Any


def evolve_term(contribution: Contribution) -> Any:
    """A loss term whose function names its plugin on errors."""
    term = contribution.value
    return attrs.evolve(term, term=attributed(contribution, term.term))


def _build_seeing(session: TrainingSession, measured: list[Contribution]) -> None:
    from forge_core.loop.log import MetricLog

    metrics = [attrs.evolve(c.value, read=attributed(c, c.value.read)) for c in measured]
    session.metrics = MetricLog(session, metrics)
    profiling = session.config[ProfilingConfig]
    if profiling.start_step is not None and session.ranks.is_main:
        from forge_core.metrics.profiler import StepProfiler

        session.profiler = StepProfiler(
            profiling,
            session.run.path,
            peak_flops=session.metrics.meter.peak_flops,
            notice=session.metrics.notice,
        )
        session.exit_stack.callback(session.profiler.close)
