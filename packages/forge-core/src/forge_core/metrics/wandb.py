"""The writer "wandb": a run on Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.errors import ForgeError
from forge_core.metrics.options import WandbOptions
from forge_core.metrics.writers import load_package, recall, remember, resolved_config

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

KEPT = "wandb.json"


class WandbWriter:
    """Logs to one W&B run, which later starts in the same run folder go on with.

    The server's own step only grows: a value sent for a step below the greatest is dropped, which after a
    resume would be every value up to where the first start came. So that step is never set, and values are
    drawn over a metric called `step`.
    """

    def __init__(self, run: Path, name: str, options: WandbOptions) -> None:
        wandb = load_package("wandb", "wandb")
        ident = self._ident(run, options.resume)
        self.run: Any = wandb.init(
            project=options.project,
            entity=options.entity,
            name=options.name or name,
            group=options.group,
            tags=options.tags or None,
            mode=options.mode,
            id=ident,
            resume=options.resume,
            dir=str(run),
            config=resolved_config(run),
        )
        try:
            self.run.define_metric("step")
            self.run.define_metric("*", step_metric="step")
            remember(run / KEPT, {"id": ident})
        except BaseException:
            self.run.finish(exit_code=1)
            raise

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one record."""
        self.run.log({"step": step, **metrics})

    def close(self) -> None:
        """Send what is left and end the run."""
        self.run.finish()

    @staticmethod
    def _ident(run: Path, resume: str) -> str:
        known = None if resume == "never" else recall(run / KEPT).get("id")
        if known is None and resume == "must":
            raise ForgeError(
                f"metrics.wandb.resume is 'must', but {run / KEPT} names no run",
                "resume = 'allow' begins one",
            )
        return known or secrets.token_hex(4)


def build(session: TrainingSession, options: WandbOptions) -> WandbWriter:
    """Component target. Raises ForgeError if the package is missing."""
    return WandbWriter(Path(session.run.path), session.run.name, options)
