"""The training session: what hooks see while a run is built, and what the loop works with afterwards."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.config.tables import TrainConfig
from forge_core.distributed.environment import Environment
from forge_core.distributed.mesh import Mesh
from forge_core.distributed.process_group import Processes
from forge_core.loop.clip import GlobalNorm
from forge_core.loop.naming import global_name
from forge_core.plugins import PluginCatalog, Plugins

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_core.config.config import Config
    from forge_core.contract import (
        BatchStream,
        Checkpointer,
        CheckpointExtra,
        DataPipeline,
        Evaluator,
        Forward,
        Generator,
        LossTerm,
        MeshAxis,
        NamedOptimizer,
        StepFn,
    )
    from forge_core.distributed.control import Control
    from forge_core.distributed.failure import Watch
    from forge_core.loop.folder import RunFolder
    from forge_core.loop.freeze import Freeze
    from forge_core.loop.guard import Guard
    from forge_core.loop.log import MetricLog
    from forge_core.loop.ranks import Ranks
    from forge_core.loop.scaler import LossScaler
    from forge_core.loop.signals import StopSignal
    from forge_core.loss.attached import AttachedLosses
    from forge_core.metrics.profiler import StepProfiler
    from forge_core.plugins import Contribution
    from forge_core.plugins.plan import Plan


@attrs.define(kw_only=True, eq=False)
class TrainingSession:
    """Everything a run consists of. Hooks see the first block; the rest exists once the run is built.

    Attributes:
        config: the resolved configuration, `session.config[ModelConfig]`.
        plugins: loaded plugins.
        ranks: coordinates of this process. mesh: the same by axis, and the groups over each; always there.
        device: where the model lives.
        compute_dtype, param_dtype: of matrix products, and of weights and optimizer state.
        run: name and folder of the run.
        log: logger; only rank 0 prints.
        exit_stack: closed when the run ends, whatever happened; hooks put their clean-up here.
        scaler: of the loss, under fp16; else None.
        control: the small reduction over ranks; watch: looks after the other ranks. Both None in one process.
        step: updates done. tokens_seen: positions trained on, all ranks.
        added: names of parameters that transforms put beside those of the model. moved: by name, the old one
            of those that transforms put elsewhere.
        matrices: by name, weights of the whole decoder's matrices that a token uses, for counting FLOPs.
        plan: what plugins contributed. contributions: gathers it while the session is built, then empty.
    """

    config: Config
    plugins: Plugins
    ranks: Ranks
    device: torch.device
    compute_dtype: torch.dtype
    param_dtype: torch.dtype
    run: RunFolder
    exit_stack: ExitStack
    processes: Processes = attrs.field(factory=lambda: Processes(Environment()))
    log: logging.Logger = attrs.field(factory=lambda: logging.getLogger("forge"))
    step: int = 0
    tokens_seen: int = 0

    # built, in this order
    mesh_axes: Sequence[MeshAxis] = ()
    mesh: Mesh = attrs.field(factory=Mesh)
    data: DataPipeline = attrs.field(init=False)
    stream: BatchStream = attrs.field(init=False)
    model: nn.Module = attrs.field(init=False)
    added: Collection[str] = ()
    moved: Mapping[str, str] = attrs.field(factory=dict)
    matrices: Mapping[str, float] = attrs.field(factory=dict)
    auxiliary_models: Mapping[str, nn.Module] = attrs.field(factory=dict)
    freeze: Freeze = attrs.field(init=False)
    attached: AttachedLosses = attrs.field(init=False)
    global_norm: GlobalNorm = attrs.field(factory=GlobalNorm)
    forward: Forward = attrs.field(init=False)
    loss_terms: Sequence[LossTerm] = ()
    optimizers: Mapping[str, NamedOptimizer] = attrs.field(factory=dict)
    step_fn: StepFn = attrs.field(init=False)
    before_updates: Sequence[Any] = ()
    after_updates: Sequence[Any] = ()
    evaluators: Mapping[str, Evaluator] = attrs.field(factory=dict)
    generator: Generator | None = None
    checkpoint_extras: Mapping[str, Sequence[CheckpointExtra]] = attrs.field(factory=dict)
    checkpointer: Checkpointer | None = None
    guard: Guard = attrs.field(init=False)
    scaler: LossScaler | None = None
    events: dict[str, tuple[Any, ...]] = attrs.field(factory=dict)
    metrics: MetricLog = attrs.field(init=False)
    profiler: StepProfiler | None = None
    stop: StopSignal = attrs.field(init=False)
    control: Control | None = None
    watch: Watch | None = None
    plan: Plan = attrs.field(init=False)
    contributions: list[Contribution] = attrs.field(factory=list)
    grad_accum_steps: int = 1
    saved_step: int | None = None

    def component(self, category: str, name: str) -> Any:
        """The object that a component's target names.

        Raises:
            KeyError: no such component; PluginError: its target cannot be imported.
        """
        return PluginCatalog(self.plugins).load(category, name)

    def options(self, path: str, name: str) -> Any:
        """Options of component `name` picked by the table at the dotted `path`; None if it has none."""
        return self.config.options(path, name)

    def global_name(self, module: nn.Module, parameter: str) -> str:
        """The name of `module`'s parameter in the whole model, the same on every layout."""
        for name, candidate in self.model.named_modules():
            if candidate is module:
                return global_name(f"{name}.{parameter}" if name else parameter)
        raise KeyError(f"{type(module).__name__} is not part of the model")

    def emit(self, event: str, *args: Any) -> None:
        """Tell the observers of `event`."""
        for observer in self.events.get(event, ()):
            observer(self, *args)

    def check_stop(self) -> bool:
        """Whether the run is to end, the same answer on every rank; all ranks must ask at the same point.

        For long loops beside training, such as those of evaluators. It never waits for the device.
        """
        return bool(self.stop) if self.control is None else self.control.check_stop()

    @property
    def max_steps(self) -> int:
        return self.config[TrainConfig].max_steps
