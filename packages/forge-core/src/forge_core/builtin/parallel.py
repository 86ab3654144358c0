"""How one model runs on the ranks of a run: what goes together, and the transforms that divide it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forge_core.config.tables import DistributedConfig, ModelConfig, TrainConfig
from forge_core.contract.parts import Transform
from forge_core.errors import Problem
from forge_core.markers import hookimpl

if TYPE_CHECKING:
    from forge_core.config.config import Config
    from forge_core.loop.session import TrainingSession


@hookimpl
def forge_problems(config: Config, world_size: int) -> Iterator[Problem]:
    yield from _tensor_problems(config)
    yield from _context_problems(config)
    sizes, train = config[DistributedConfig], config[TrainConfig]
    data_ranks = world_size // (sizes.tp * sizes.cp)
    if sizes.cpu_offload and data_ranks * sizes.cp < 2:
        message = "only weights that data ranks share can be offloaded, and there is one data rank"
        yield Problem("distributed.cpu_offload", message, "set it to false, or start more processes")
    if train.float8 and sizes.tp > 1:
        yield Problem("train.float8", "float8 products cannot be divided over tensor ranks", "set tp = 1")
    if train.activation_checkpointing == "none" and train.recompute_every > 1:
        message = "has no effect without activation checkpointing"
        yield Problem("train.recompute_every", message, 'set train.activation_checkpointing = "full"')


def _tensor_problems(config: Config) -> Iterator[Problem]:
    model, sizes = config[ModelConfig], config[DistributedConfig]
    tp = sizes.tp
    if tp == 1:
        return
    for name in ("n_heads", "n_kv_heads", "ffn_hidden_dim"):
        value = getattr(model, name)
        if value is not None and value % tp:
            yield Problem("distributed.tp", f"{tp} does not divide model.{name} = {value}")
    vocabulary = model.vocab_size or tp
    if -(-vocabulary // tp) * (tp - 1) >= vocabulary:
        yield Problem("distributed.tp", f"{tp} ranks cannot each have a row of {vocabulary} in the head")
    length = config[TrainConfig].seq_len
    if sizes.sequence_parallel and length % (tp * sizes.cp):
        parts = f"tp {tp}" + (f" x cp {sizes.cp}" if sizes.cp > 1 else "")
        message = f"train.seq_len = {length} is not divisible by {parts}"
        yield Problem("distributed.sequence_parallel", message, "change the length, or set it to false")


def _context_problems(config: Config) -> Iterator[Problem]:
    sizes = config[DistributedConfig]
    if sizes.cp == 1:
        return
    length = config[TrainConfig].seq_len
    if length % (2 * sizes.cp):
        message = f"train.seq_len = {length} is not divisible by {2 * sizes.cp} (two pieces a rank)"
        yield Problem("distributed.cp", message)


@hookimpl
def forge_model_transforms(session: TrainingSession) -> Iterator[Transform]:
    from forge_core.loop import transforms

    train, sizes, mesh = session.config[TrainConfig], session.config[DistributedConfig], session.mesh
    if train.float8:
        yield Transform(
            phase="modify", name="float8", apply=lambda model: transforms.float8_model(session, model)
        )
    if sizes.tp > 1 or sizes.cp > 1:
        yield Transform(
            phase="shard", name="tensor and context ranks", apply=lambda m: transforms.divide(session, m)
        )
    if train.activation_checkpointing != "none":
        yield Transform(
            phase="remat", name="blocks", apply=lambda model: transforms.recompute(session, model)
        )
    if train.compile:
        yield Transform(
            phase="compile", name="blocks", apply=lambda model: transforms.compile_model(session, model)
        )
    if mesh.size("dp_replicate") * mesh.size("fsdp") > 1:
        yield Transform(phase="data", name="FSDP2", apply=lambda model: transforms.shard_data(session, model))
    yield Transform(
        phase="materialise", name="weights", apply=lambda model: transforms.materialise_model(session, model)
    )
