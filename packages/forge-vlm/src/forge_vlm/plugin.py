"""The plugin `vlm`: a table `[vlm]` gives the decoder an encoder of images to see with.

`forge check` imports this module, so it must not import torch; the functions below do it when called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from forge_core import hookimpl
from forge_core.config import Config, Problem
from forge_core.config.tables import TrainConfig
from forge_core.contract import (
    Alias,
    Architecture,
    CheckpointExtra,
    Component,
    Flops,
    LayerInfo,
    Metric,
    Observer,
    Transform,
)
from forge_vlm.components import COMPONENTS
from forge_vlm.table import VlmConfig

if TYPE_CHECKING:
    from torch import nn

    from forge_core import TrainingSession
    from forge_core.contract import Evaluator, Forward, Generator

forge_api = 1


@hookimpl
def forge_tables() -> type:
    return VlmConfig


@hookimpl
def forge_components() -> Iterable[Component]:
    return COMPONENTS


@hookimpl
def forge_problems(config: Config, world_size: int) -> Iterator[Problem]:
    from forge_vlm.problems import all_problems

    yield from all_problems(config)


@hookimpl
def forge_flops(config: Config, trains: Callable[[str], bool]) -> Flops:
    from forge_vlm.flops import flops_of_seeing

    return flops_of_seeing(config, trains)


@hookimpl
def forge_architectures() -> Mapping[str, Architecture]:
    from forge_vlm.architectures import ARCHITECTURES

    return ARCHITECTURES


@hookimpl
def forge_build_model(session: TrainingSession, decoder: nn.Module) -> nn.Module:
    from forge_vlm.model import build_model

    return build_model(session, decoder)


@hookimpl
def forge_build_block(session: TrainingSession, layer: LayerInfo) -> nn.Module | None:
    from forge_vlm.fusions.base import fusion_of

    return fusion_of(session).build_block(layer)


@hookimpl
def forge_build_ffn(session: TrainingSession, layer: LayerInfo) -> nn.Module | None:
    from forge_vlm.fusions.base import fusion_of

    return fusion_of(session).build_ffn(layer)


@hookimpl
def forge_build_embed(session: TrainingSession, layer: LayerInfo) -> nn.Module | None:
    from forge_vlm.fusions.base import fusion_of

    return fusion_of(session).build_embed(layer)


@hookimpl
def forge_blocks_after(session: TrainingSession, layer: LayerInfo) -> Iterable[nn.Module]:
    from forge_vlm.fusions.base import fusion_of

    return fusion_of(session).blocks_after(layer)


@hookimpl
def forge_attention_masks(session: TrainingSession) -> Iterable[Any]:
    from forge_vlm.fusions.base import fusion_of

    return fusion_of(session).masks()


@hookimpl
def forge_model_transforms(session: TrainingSession) -> Iterator[Transform]:
    """The encoder is sharded apart from the decoder, of which it may not share what trains, and before it."""
    from forge_vlm import sharding
    from forge_vlm.model import load_encoder

    if session.config[TrainConfig].activation_checkpointing != "none":
        yield Transform(
            phase="remat", name="encoder", apply=lambda model: sharding.recompute_encoder(session, model)
        )
    if session.mesh.connected:
        yield Transform(
            phase="compile", name="encoder apart", apply=lambda model: sharding.shard_encoder(session, model)
        )
    yield Transform(phase="adapt", name="encoder weights", apply=load_encoder)
    vlm = session.config[VlmConfig]
    if vlm.fusion == "mot" and session.options("vlm", "mot").copy_text:
        from forge_vlm.fusions.mot import copy_text

        yield Transform(phase="adapt", name="text weights for visual tokens", apply=copy_text)


@hookimpl
def forge_module_aliases(session: TrainingSession) -> list[Alias]:
    frozen = session.config[VlmConfig].encoder.frozen
    return [
        Alias(name="encoder", patterns=("encoder.*",), frozen=frozen),
        Alias(name="connector", patterns=("connector.*",)),
        Alias(name="decoder", patterns=("decoder.*",)),
    ]


@hookimpl
def forge_build_forward(session: TrainingSession, model: nn.Module) -> Forward:
    from forge_vlm.forward import VlmForward

    return VlmForward(session)


@hookimpl
def forge_observers(session: TrainingSession) -> Iterable[Observer]:
    from forge_vlm.metrics import counts_of

    return [counts_of(session)]


@hookimpl
def forge_extra_metrics(session: TrainingSession, model: nn.Module) -> Iterable[Metric]:
    from forge_vlm.metrics import all_metrics

    return all_metrics(session)


@hookimpl
def forge_checkpoint_extras(session: TrainingSession) -> Iterable[CheckpointExtra]:
    from forge_vlm.extras import freeze_state, seen_state

    return [freeze_state(session), seen_state(session)]


@hookimpl
def forge_evaluators(session: TrainingSession) -> dict[str, Evaluator]:
    from forge_vlm.evaluation.run import evaluators_of

    return evaluators_of(session)


@hookimpl
def forge_build_generator(session: TrainingSession) -> Generator:
    from forge_vlm.generator import VlmGenerator

    return VlmGenerator()
