"""Model transforms: apply them phase by phase, and the core's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from forge_core.config.tables import ModelConfig, TrainConfig
from forge_core.contract import PHASES, SplitSpec, Transform
from forge_core.errors import PluginError
from forge_core.model import materialise
from forge_core.plugins import Contribution, attributed

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession


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


def compile_blocks(model: nn.Module, backend: str) -> nn.Module:
    """torch.compile every block on its own: equal blocks share one graph, and sharding comes outside of
    it."""
    for block in blocks_of(model):
        block.compile(backend=backend)
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of every part of the model that says how it splits; the model itself if none does."""
    blocks: list[nn.Module] = []
    for module in model.modules():
        split = getattr(module, "split", None)
        spec = split() if callable(split) else None
        if isinstance(spec, SplitSpec):
            blocks += list(module.get_submodule(spec.blocks).children())
    return blocks or [model]


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
    return model
