"""The plugin `retention`: its table, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from forge_core import hookimpl
from forge_core.config import Config, key, table
from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerInfo, LossTerm

if TYPE_CHECKING:
    from torch import nn

    from forge_core import TrainingSession

forge_api = 1


@table
class RetentionConfig:
    """Retention (Sun et al. 2023) in the place of attention."""

    layers: str = key("all", choices=("all", "even", "odd"), help="Which layers have it, counted from 0.")
    smoothness: float = key(
        0.0, ge=0, help="Weight of the squared change of hidden states between tokens; 0 leaves it out."
    )

    def has(self, index: int) -> bool:
        """Whether layer `index` has it."""
        return self.layers == "all" or (index % 2 == 0) == (self.layers == "even")


@hookimpl
def forge_tables() -> type:
    return RetentionConfig


@hookimpl
def forge_build_mixer(session: TrainingSession, layer: LayerInfo) -> nn.Module | None:
    if not session.config[RetentionConfig].has(layer.index):
        return None
    from forge_retention.mixer import Retention

    assert layer.model.head_dim is not None  # resolved when left out
    return Retention(layer.model.dim, layer.model.n_heads, layer.model.head_dim, layer.index)


@hookimpl
def forge_flops(config: Config) -> float:
    """Five square projections instead of attention's grouped ones; the scores cost the same."""
    model, mine = config[ModelConfig], config[RetentionConfig]
    assert model.n_kv_heads is not None
    assert model.head_dim is not None
    layers = sum(mine.has(index) for index in range(model.n_layers))
    grouped = 2 * model.n_heads + 2 * model.n_kv_heads
    return 6.0 * model.dim * model.head_dim * (5 * model.n_heads - grouped) * layers


@hookimpl
def forge_extra_losses(session: TrainingSession) -> Iterable[LossTerm]:
    weight = session.config[RetentionConfig].smoothness
    if not weight:
        return []
    from forge_retention.smoothness import smoothness

    return [LossTerm(name="retention", weight=weight, needs="hidden", per="tokens", term=smoothness)]
