"""From a session to its stages: cutting the model, finding the ranks, and the step function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch._functorch import config as functorch

from forge_core.errors import ConfigError, Problem
from forge_core.files import user_path
from forge_pp.costs import find_cut
from forge_pp.orders import read_csv
from forge_pp.parts import StagedModel, staged
from forge_pp.step import PipelineStep
from forge_pp.table import PpConfig, is_file, schedule_of, stages_per_rank
from forge_pp.whole import RelayedForward, Whole
from forge_pp.window import Line

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession


def owners(pp: PpConfig) -> dict[int, int]:
    """By stage, the rank of the pipeline that has it."""
    if is_file(pp):
        return read_csv(user_path(pp.schedule)).owners
    schedule = schedule_of(pp)
    assert schedule is not None
    return {stage: schedule.owner(stage, pp.size) for stage in range(pp.size * stages_per_rank(pp))}


def cut_model(session: TrainingSession, model: nn.Module) -> nn.Module:
    """This rank's stages of the model.

    Raises:
        ConfigError: the model cannot be cut as the table says.
    """
    pp, mine = session.config[PpConfig], session.mesh.rank("pp")
    return staged(model, find_cut(session, model), [s for s, rank in owners(pp).items() if rank == mine])


def keep_gathered(model: StagedModel) -> None:
    """Sharded stages gather their weights once a step: several micro-batches are in flight, and a backward
    that is taken apart looks for the weights that its forward used."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(False, recurse=False)


def build_step(session: TrainingSession) -> PipelineStep:
    """The step function over this rank's stages; where the model is whole it is only there to be looked at.

    Raises:
        ConfigError: the session's forward cannot run parts of a model.
    """
    model = session.model
    if not isinstance(model, StagedModel):
        return PipelineStep()
    forward = session.forward
    if not hasattr(forward, "part") or not hasattr(forward, "carried"):
        kind = type(forward).__name__
        message = f"{kind} cannot run a part of the model: it has no part() and carried()"
        raise ConfigError([Problem("pp.size", message)])
    pp, group = session.config[PpConfig], session.mesh.group("pp")
    assert group is not None
    line = Line(
        schedule=pp.schedule,
        parts=dict(zip(model.stages, model.parts, strict=True)),
        count=pp.size * stages_per_rank(pp),
        owners=owners(pp),
        device=session.device,
        group=group,
    )
    schedule = schedule_of(pp)
    if schedule is None or schedule.splits_backward:
        # a compiled block's first backward must leave for the second what it saved
        session.exit_stack.enter_context(functorch.patch(donated_buffer=False))
    step = PipelineStep.of(session, line)
    keep_gathered(model)
    model.whole = Whole(step.relay, session.param_dtype)
    session.forward = RelayedForward(session, step)
    return step
