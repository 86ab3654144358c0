"""The plugin `newfamily`: what it adds to a run, hook by hook.

`forge check` imports this module, so it must not import torch; the functions below do it when called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from forge_core import hookimpl
from forge_core.config import Config, Problem, key, table
from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerInfo, LossTerm, Metric

if TYPE_CHECKING:
    from torch import nn

    from forge_core import TrainingSession

forge_api = 1
"""The version of Forge's plugin contract that this was written for, `forge_core.FORGE_API`."""


@table
class NewFamilyConfig:
    """A feed-forward part with squared ReLU in some of the layers."""

    computes: ClassVar[bool] = True
    every: int = key(1, ge=1, help="It takes the place of the MLP in every n-th layer.")
    penalty: float = key(
        0.0, ge=0, help="Weight of the mean square of the hidden states; 0 leaves it out.", computes=False
    )


@hookimpl
def forge_tables() -> type:
    return NewFamilyConfig


@hookimpl
def forge_problems(config: Config) -> Iterator[Problem]:
    """What `forge check` says of a configuration that cannot work, all at once."""
    every, layers = config[NewFamilyConfig].every, config[ModelConfig].n_layers
    if every > layers:
        yield Problem("newfamily.every", f"{every} is more than model.n_layers = {layers}: no layer has it")


@hookimpl
def forge_build_ffn(session: TrainingSession, layer: LayerInfo) -> nn.Module | None:
    """The part of this layer; None leaves it to others, and at last to the core's MLP."""
    if not has_it(layer.index, session.config[NewFamilyConfig].every):
        return None
    from forge_newfamily.ffn import SquaredReluFFN

    model = layer.model
    assert model.ffn_hidden_dim is not None  # resolved when left out
    return SquaredReluFFN(model.dim, model.ffn_hidden_dim)


@hookimpl
def forge_flops(config: Config) -> float:
    """The difference to the core's MLP, which the core has counted."""
    model, every = config[ModelConfig], config[NewFamilyConfig].every
    assert model.ffn_hidden_dim is not None
    layers = sum(has_it(index, every) for index in range(model.n_layers))
    matrices = 2 - (3 if model.gated_mlp else 2)
    return 6.0 * matrices * model.dim * model.ffn_hidden_dim * layers


@hookimpl
def forge_extra_losses(session: TrainingSession) -> Iterable[LossTerm]:
    weight = session.config[NewFamilyConfig].penalty
    if not weight:
        return []
    from forge_newfamily.ffn import mean_square

    return [LossTerm(name="newfamily", weight=weight, needs="hidden", per="tokens", term=mean_square)]


@hookimpl
def forge_extra_metrics(model: nn.Module) -> Iterable[Metric]:
    from forge_newfamily.ffn import SquaredReluFFN, largest_weight

    parts = [module for module in model.modules() if isinstance(module, SquaredReluFFN)]
    return [Metric(name="newfamily/largest_weight", op="max", read=lambda: largest_weight(parts))]


def has_it(index: int, every: int) -> bool:
    """Whether layer `index` has this family's part."""
    return (index + 1) % every == 0
