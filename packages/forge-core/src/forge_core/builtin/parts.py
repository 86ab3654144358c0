"""Components of the core: what `optimizer.name`, `data.source`, `metrics.writers` ... can take."""

from __future__ import annotations

from forge_core.contract.parts import Component
from forge_core.data.components import COMPONENTS as DATA
from forge_core.markers import hookimpl
from forge_core.metrics.components import COMPONENTS as METRICS
from forge_core.optim.components import COMPONENTS as OPTIM

LOSSES = (
    Component(
        category="loss",
        name="cross_entropy",
        target="forge_core.loss:build_cross_entropy",
        help="Cross-entropy fused with the head, in chunks.",
    ),
)


@hookimpl
def forge_components() -> list[Component]:
    return [*OPTIM, *LOSSES, *DATA, *METRICS]
