"""Options of the metric writers: `[metrics.tensorboard]`, `[metrics.wandb]`, `[metrics.mlflow]`."""

from __future__ import annotations

from importlib.util import find_spec

from forge_core.config.fields import key, table


@table
class TensorboardOptions:
    """Event files for TensorBoard."""

    dir: str | None = key(None, help="Folder of the event files.", derived="tensorboard/ in the run folder")


@table
class WandbOptions:
    """A run on Weights & Biases. Metrics carry their own step, so that a resumed run loses none."""

    project: str = key("forge", help="Project the run belongs to.")
    entity: str | None = key(None, help="User or team.", derived="your default on the server")
    name: str | None = key(None, help="Name shown for the run.", derived="run.name")
    group: str | None = key(None, help="Runs with one group are shown together.")
    tags: list[str] = key(factory=list, help="Labels of the run.")
    mode: str | None = key(
        None,
        choices=("online", "offline", "disabled"),
        help="Send at once, keep on disk to send later, or do nothing.",
        derived="WANDB_MODE, else online",
    )
    resume: str = key(
        "allow",
        choices=("allow", "must", "never"),
        help="allow: go on with the run this folder began, if any; must: fail without one; never: a new one.",
    )


@table
class MlflowOptions:
    """A run in MLflow."""

    tracking_uri: str | None = key(
        None,
        help="Address or folder of the tracking store.",
        derived="MLFLOW_TRACKING_URI, else MLflow's default",
    )
    experiment: str = key("forge", help="Experiment the run belongs to; made if missing.")
    run_name: str | None = key(None, help="Name shown for the run.", derived="run.name")
    tags: dict[str, str] = key(factory=dict, help="Tags of the run.")
    resume: bool = key(True, help="Go on with the run that the run folder began, if any.")


PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""The module that each writer needs; the extra of forge-core has the writer's name."""
DISTRIBUTIONS = {"mlflow": "mlflow-skinny"}
"""What brings a module, where its name is another."""


def install_hint(writer: str) -> str:
    """How to get what a writer needs. Not by the extra: on the public index forge-core is another project."""
    return f"pip install {DISTRIBUTIONS.get(writer, writer)}"


def is_missing(writer: str) -> bool:
    """Whether the package of a built-in writer is not installed. Imports nothing."""
    module = PACKAGES.get(writer)
    return module is not None and find_spec(module) is None
