"""The metric writers of the core, as components. Imports no torch.

Category "writer": `target(session, options) -> Writer`, called on rank 0 before the first update, where
`options` is the component's own table. It may fail then, with a reason; `forge_core.metrics.writers` switches
off one that fails later.
"""

from __future__ import annotations

from forge_core.contract import Component

_OPTIONS = "forge_core.metrics.options"

COMPONENTS: tuple[Component, ...] = (
    Component(
        category="writer",
        name="tensorboard",
        target="forge_core.metrics.tensorboard:build",
        options=f"{_OPTIONS}:TensorboardOptions",
        help="Event files for TensorBoard. Needs pip install tensorboard.",
    ),
    Component(
        category="writer",
        name="wandb",
        target="forge_core.metrics.wandb:build",
        options=f"{_OPTIONS}:WandbOptions",
        help="A run on Weights & Biases. Needs pip install wandb.",
    ),
    Component(
        category="writer",
        name="mlflow",
        target="forge_core.metrics.mlflow:build",
        options=f"{_OPTIONS}:MlflowOptions",
        help="A run in an MLflow tracking store. Needs pip install mlflow-skinny.",
    ),
)
