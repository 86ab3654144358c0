"""The plugin `moe`: a table `[moe]` turns feed-forward parts into experts.

`forge check` imports this module, so it must not import torch; the functions below do it when called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_core import hookimpl
from forge_core.config import Config, Problem
from forge_core.config.tables import ModelConfig, TrainConfig
from forge_core.contract import Alias, CheckpointExtra, Component, LayerInfo, MeshAxis, Metric, Transform
from forge_moe.components import COMPONENTS
from forge_moe.table import MoeConfig, expert_layers, has_experts

if TYPE_CHECKING:
    from torch import nn

    from forge_core import TrainingSession
    from forge_core.contract import Architecture

forge_api = 1


@hookimpl
def forge_tables() -> type:
    return MoeConfig


@hookimpl
def forge_components() -> Iterable[Component]:
    return COMPONENTS


@hookimpl
def forge_problems(config: Config, axes: Sequence[MeshAxis]) -> Iterator[Problem]:
    from forge_moe.problems import all_problems

    yield from all_problems(config, axes)


@hookimpl
def forge_mesh_axes(config: Config) -> list[MeshAxis]:
    return [
        MeshAxis(name="ep", size=config[MoeConfig].ep, place=35, carved_from="dp_shard", params_differ=True)
    ]


@hookimpl
def forge_flops(config: Config) -> float:
    from forge_moe.flops import flops_beyond_attention, flops_beyond_mlp

    model, moe = config[ModelConfig], config[MoeConfig]
    attention = flops_beyond_attention(model, moe.mla, config[TrainConfig].seq_len)
    return flops_beyond_mlp(model, moe) + attention


@hookimpl
def forge_architectures() -> Mapping[str, Architecture]:
    from forge_moe.architectures import ARCHITECTURES

    return ARCHITECTURES


@hookimpl
def forge_build_mixer(session: TrainingSession, layer: LayerInfo) -> nn.Module | None:
    mla = session.config[MoeConfig].mla
    if not mla.kv_rank:
        return None
    from forge_moe.mla import LatentAttention

    return LatentAttention(layer.model, mla, layer.index)


@hookimpl
def forge_build_ffn(session: TrainingSession, layer: LayerInfo) -> nn.Module | None:
    moe = session.config[MoeConfig]
    if not has_experts(moe, layer.index):
        return None
    from forge_moe.ffn import build_ffn

    return build_ffn(session, layer.model, moe)


@hookimpl
def forge_model_transforms(session: TrainingSession) -> Iterator[Transform]:
    """Experts take their ranks where tensor ranks do. They are sharded before their blocks are, and so last
    of what comes before that."""
    from forge_moe import parallel, upcycle

    if session.config[MoeConfig].upcycle_from is not None:
        yield Transform(
            phase="adapt", name="experts from an MLP", apply=lambda model: upcycle.upcycle(session, model)
        )
    if session.mesh.connected:
        yield Transform(
            phase="shard", name="experts over ranks", apply=lambda m: parallel.divide_experts(session, m)
        )
        yield Transform(
            phase="compile", name="experts apart", apply=lambda model: parallel.shard_apart(session, model)
        )


@hookimpl
def forge_before_updates(session: TrainingSession, model: nn.Module) -> list[Any]:
    """Only the exact balance loss has to know routes before they are trained on."""
    moe = session.config[MoeConfig]
    if moe.aux_loss != "exact" or not moe.aux_loss_weight:
        return []
    from forge_moe.exact import route_counter
    from forge_moe.running import balance_of

    return [route_counter(session, balance_of(session, model))]


@hookimpl
def forge_module_aliases() -> list[Alias]:
    return [
        Alias(name="experts", patterns=("*.mlp.experts.*",)),
        Alias(name="router", patterns=("*.mlp.router.*",)),
        Alias(name="shared_experts", patterns=("*.mlp.shared.*", "*.mlp.shared_gate.*")),
    ]


@hookimpl
def forge_after_updates(session: TrainingSession, model: nn.Module) -> list[Any]:
    from forge_moe.running import balance_of

    return [balance_of(session, model).after_update]


@hookimpl
def forge_checkpoint_extras(session: TrainingSession) -> list[CheckpointExtra]:
    """Factors of gradients come from the update before; biases are buffers of the model."""
    if not session.config[MoeConfig].gradient_scaling:
        return []
    from forge_moe.running import balance_of

    balance = balance_of(session, session.model)
    return [
        CheckpointExtra(
            name="gradient_scales",
            version=1,
            state_dict=lambda: dict(balance.scales),
            load_state_dict=balance.scale_gradients,
        )
    ]


@hookimpl
def forge_extra_metrics(session: TrainingSession, model: nn.Module) -> list[Metric]:
    from forge_moe.metrics import all_metrics
    from forge_moe.running import balance_of, places_of

    moe = session.config[MoeConfig]
    balance = balance_of(session, model)
    indices = expert_layers(moe, session.config[ModelConfig].n_layers)
    return list(all_metrics(balance, places_of(model, indices), indices, moe, session.attached))
