"""Model transforms: apply them phase by phase, and the core's own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge_core.config.tables import DistributedConfig, ModelConfig, RunConfig, TrainConfig
from forge_core.contract import PHASES, SplitSpec, Transform
from forge_core.errors import ConfigError, PluginError, Problem
from forge_core.model import materialise
from forge_core.plugins import Contribution, attributed

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession
    from forge_core.parallel.data import ShardPolicy
    from forge_core.parallel.recompute import Recompute


def apply_transforms(
    model: nn.Module, contributions: list[Contribution], phases: Sequence[str] = PHASES
) -> tuple[nn.Module, list[Contribution]]:
    """Apply transforms by phase, inside a phase in plugin order; returns the model and the order used.

    Only those of the given phases are applied; the order has all of them.

    Raises:
        PluginError: a transform names a phase that does not exist.
    """
    for c in contributions:
        if c.value.phase not in PHASES:
            raise PluginError(
                f"plugin {c.plugin}: transform {c.value.name!r} has phase {c.value.phase!r}",
                f"one of {', '.join(PHASES)}",
            )
    ordered = sorted(contributions, key=lambda c: PHASES.index(c.value.phase))
    for c in ordered:
        transform: Transform = c.value
        if transform.phase in phases:
            model = attributed(c, transform.apply)(model)
    return model, ordered


def added_and_moved(
    before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]
) -> tuple[frozenset[str], dict[str, str]]:
    """What transforms that change modules did to the parameters of a model.

    Args:
        before, after: its parameters by global name.

    Returns:
        Names of those that are new beside all that there were; none where one of those is gone, since a new
        one may stand for it. By new name, the old one of those that stand elsewhere.
    """
    old = {id(parameter): name for name, parameter in before.items()}
    new = {name: old.get(id(parameter)) for name, parameter in after.items() if name not in before}
    moved = {name: place for name, place in new.items() if place is not None and place not in after}
    kept = after.keys() | set(moved.values())
    added = frozenset(name for name, place in new.items() if place is None)
    return (added if before.keys() <= kept else frozenset()), moved


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of every part of the model that says how it splits; the model itself if none does."""
    blocks: dict[int, nn.Module] = {}  # each once: a model around another may say the same of it
    for module in model.modules():
        split = getattr(module, "split", None)
        spec = split() if callable(split) else None
        if isinstance(spec, SplitSpec):
            blocks |= {id(block): block for block in module.get_submodule(spec.blocks).children()}
    return list(blocks.values()) or [model]


def divide(session: TrainingSession, model: nn.Module) -> nn.Module:
    """Tensor and context parallel, by what the model's modules say of themselves.

    For the session's model, and for others that run beside it on the same ranks.
    """
    from forge_core.parallel.context import divide_sequence
    from forge_core.parallel.flash import runs_on
    from forge_core.parallel.sequence import SequencePart
    from forge_core.parallel.tensor import tensor_parallel

    mesh, config = session.mesh, session.config[DistributedConfig]
    tensor = mesh.sub("tp") if mesh.size("tp") > 1 else None
    context = mesh.sub("cp") if mesh.size("cp") > 1 else None
    how = config.cp_attention
    if how == "auto" and (session.compute_dtype.itemsize > 2 or not runs_on(session.device)):
        how = "gather"  # the ring's blocks would run without a flash kernel
    part = SequencePart(context, tensor if config.sequence_parallel else None, how)
    if tensor is not None:
        tensor_parallel(model, tensor, part)
    return divide_sequence(model, part) if part.context or part.tensor else model


def recompute(session: TrainingSession, model: nn.Module) -> nn.Module:
    """Activation checkpointing of blocks. Whole blocks that are compiled, too, come with `compile_model`."""
    from forge_core.parallel.recompute import recompute_blocks

    if not _recomputes_compiled(session):
        recompute_blocks(blocks_of(model), recompute_policy(session))
    return model


def compile_model(session: TrainingSession, model: nn.Module) -> nn.Module:
    """torch.compile every block on its own: equal blocks share one graph, and sharding comes outside of it.

    Blocks that recompute as a whole do so around what is compiled, which spares the compiler looking into it.
    """
    from forge_core.parallel.recompute import recompute_blocks

    backend = session.config[TrainConfig].compile_backend
    blocks = blocks_of(model)
    if not _recomputes_compiled(session):
        for block in blocks:
            block.compile(backend=backend)
        return model
    for block in blocks:
        compile_forward(block, backend)
    recompute_blocks(blocks, recompute_policy(session))
    return model


def compile_forward(block: nn.Module, backend: str) -> None:
    """Compile what a block computes, but not what is hooked on it."""
    block.forward = torch.compile(block.forward, backend=backend)
    block.__dict__["forge_compiled"] = True


def _recomputes_compiled(session: TrainingSession) -> bool:
    train = session.config[TrainConfig]
    return train.compile and train.activation_checkpointing == "full"


def recompute_policy(session: TrainingSession) -> Recompute:
    """What blocks of this run compute again; plugins whose blocks are not the decoder's do it alike."""
    from forge_core.parallel.recompute import Recompute

    train = session.config[TrainConfig]
    return Recompute(
        mode=train.activation_checkpointing, every=train.recompute_every, keep=tuple(train.recompute_keep)
    )


def shard_data(session: TrainingSession, model: nn.Module) -> nn.Module:
    """FSDP2 over the data ranks, per block and root; also for frozen models beside the session's."""
    from forge_core.parallel.data import shard

    mesh = session.mesh.data_parallel()
    if mesh is None:
        return model
    for part in getattr(model, "parts", (model,)):  # parts that run apart gather their weights apart
        shard(part, blocks_of(part), mesh, shard_policy(session))
    return model


def shard_policy(session: TrainingSession) -> ShardPolicy:
    """How FSDP2 shards the blocks of this run; plugins that shard a part on its own do it alike."""
    from forge_core.parallel.data import ShardPolicy

    config = session.config[DistributedConfig]
    low = session.compute_dtype is not session.param_dtype
    return ShardPolicy(
        reshard_after_forward=config.reshard_after_forward,
        cpu_offload=config.cpu_offload,
        compute=session.compute_dtype if low else None,
        reduce=session.param_dtype if low else None,
    )


def float8_model(session: TrainingSession, model: nn.Module) -> nn.Module:
    """Linear layers of blocks in float8 with scales of their own (torchao).

    Raises:
        ConfigError: the device cannot, or torchao is not installed.
    """
    device = session.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        what = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else f"a device of type {device.type}"
        )
        message = f"float8 products need a GPU of compute capability 8.9 or more; this is {what}"
        raise ConfigError([Problem("train.float8", message, "set train.float8 = false")])
    try:
        float8: Any = importlib.import_module("torchao.float8")
    except ImportError as error:
        raise ConfigError(
            [Problem("train.float8", "torchao is not installed", "pip install torchao")]
        ) from error
    for block in blocks_of(model):
        float8.convert_to_float8_training(block, module_filter_fn=_takes_float8)
    return model


def _takes_float8(module: nn.Module, name: str) -> bool:
    """The hardware multiplies in pieces of 16."""
    return isinstance(module, nn.Linear) and not module.in_features % 16 and not module.out_features % 16


def materialise_model(session: TrainingSession, model: nn.Module) -> nn.Module:
    """Memory on the session's device and the initial values that `train.seed` gives on any layout."""
    config = session.config[ModelConfig]
    materialise(
        model,
        device=session.device,
        dtype=session.param_dtype,
        seed=session.config[TrainConfig].seed,
        std=config.init_std,
        n_layers=config.n_layers,
    )
    if session.mesh.data_parallel() is not None and shard_policy(session).reduce is not None:
        from forge_core.parallel.sync import gather_once

        gather_once(model)
    return model


def start_from_weights(session: TrainingSession, model: nn.Module) -> nn.Module:
    """Fill the model from the place that `model.init_from` names, by the plugin that reads it.

    Raises:
        ConfigError: no plugin of this run does.
    """
    choice = session.config[RunConfig].choose
    answer = session.plugins.choose("forge_build_initial_weights", choice, session=session)
    if answer is None:
        raise ConfigError([Problem("model.init_from", "no plugin of this run reads weights from a folder")])
    session.contributions.append(answer)
    attributed(answer, answer.value)(model)
    return model
