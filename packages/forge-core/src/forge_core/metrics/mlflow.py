"""The writer "mlflow": a run in an MLflow tracking store."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.metrics.options import MlflowOptions
from forge_core.metrics.writers import flatten, load_package, recall, remember, resolved_config

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

KEPT = "mlflow.json"
PARAMS_A_CALL = 100
LONGEST_PARAM = 500
FOREIGN = re.compile(r"[^\w\-. /]", re.ASCII)


class MlflowWriter:
    """Logs to one MLflow run, which later starts in the same run folder go on with.

    A call to a tracking server may take a second, so a thread makes them; its errors surface at the next
    record.
    """

    def __init__(self, run: Path, name: str, options: MlflowOptions) -> None:
        mlflow = load_package("mlflow", "mlflow")
        self.metric: Any = mlflow.entities.Metric
        self.client: Any = mlflow.MlflowClient(tracking_uri=options.tracking_uri)
        self.run_id = self._known(run) if options.resume else None
        if self.run_id is None:
            self.run_id = self._begin(options, options.run_name or name)
            self._log_params(mlflow.entities.Param, resolved_config(run))
            remember(run / KEPT, {"run_id": self.run_id})
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self.sent: list[Future[Any]] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue one record. Raises what an earlier record failed with."""
        while self.sent and self.sent[0].done():
            self.sent.pop(0).result()
        now = int(time.time() * 1000)
        batch = [
            self.metric(FOREIGN.sub("_", name), float(value), now, step) for name, value in metrics.items()
        ]
        self.sent.append(self.thread.submit(self.client.log_batch, self.run_id, metrics=batch))

    def close(self) -> None:
        """Wait for what is queued and end the run. Raises what a record failed with."""
        failed = [future for future in self.sent if future.exception() is not None]
        self.sent.clear()
        self.thread.shutdown()
        self.client.set_terminated(self.run_id, status="FAILED" if failed else "FINISHED")
        for future in failed:
            future.result()

    def _known(self, run: Path) -> str | None:
        """The run that an earlier start began, if the store still has it."""
        run_id = recall(run / KEPT).get("run_id")
        if run_id is None:
            return None
        try:
            self.client.update_run(run_id, status="RUNNING")
        except Exception:  # another store, or a run that was deleted: MLflow has one error class for all
            return None
        return run_id

    def _begin(self, options: MlflowOptions, name: str) -> str:
        experiment = self.client.get_experiment_by_name(options.experiment)
        ident = (
            self.client.create_experiment(options.experiment)
            if experiment is None
            else experiment.experiment_id
        )
        return str(self.client.create_run(ident, run_name=name, tags=dict(options.tags)).info.run_id)

    def _log_params(self, param: Any, config: Mapping[str, Any]) -> None:
        params = iter([param(key, str(value)[:LONGEST_PARAM]) for key, value in flatten(config)])
        while batch := list(islice(params, PARAMS_A_CALL)):
            self.client.log_batch(self.run_id, params=batch)


def build(session: TrainingSession, options: MlflowOptions) -> MlflowWriter:
    """Component target. Raises ForgeError if the package is missing."""
    return MlflowWriter(Path(session.run.path), session.run.name, options)
