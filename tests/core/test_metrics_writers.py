"""Writers: several at once, no value dropped after a resume, and a failing one harms nobody."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from forge_core.errors import ForgeError
from forge_core.metrics import mlflow as mlflow_writer
from forge_core.metrics import tensorboard as tensorboard_writer
from forge_core.metrics import wandb as wandb_writer
from forge_core.metrics.options import (
    MlflowOptions,
    TensorboardOptions,
    WandbOptions,
    install_hint,
    is_missing,
)
from forge_core.metrics.writers import WriterSet, flatten, resolved_config, start_writers

CONFIG = '[run]\nname = "night"\n[optimizer]\nlr = 0.001\nbetas = [0.9, 0.95]\n[[data.mix]]\nname = "books"\n'


@pytest.fixture
def session(tmp_path: Path) -> Any:
    folder = tmp_path / "night"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG)
    return types.SimpleNamespace(run=types.SimpleNamespace(path=folder, name="night"))


class Kept:
    """A writer that keeps what it gets."""

    def __init__(self, fail_at: int | None = None, fail_close: bool = False) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.fail_at, self.fail_close = fail_at, fail_close
        self.closed = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.fail_at:
            raise ConnectionError("server is gone\nand more")
        self.records.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1
        if self.fail_close:
            raise OSError("cannot flush")


def test_several_at_once_and_a_failing_one_is_switched_off() -> None:
    notices: list[str] = []
    good, bad, late = Kept(), Kept(fail_at=2), Kept(fail_close=True)
    writers = WriterSet({"bad": bad, "good": good, "late": late}, notices.append)
    for step in (1, 2, 3):
        writers.write(step, {"a": float(step)})
    assert good.records == late.records == [(1, {"a": 1.0}), (2, {"a": 2.0}), (3, {"a": 3.0})]
    assert bad.records == [(1, {"a": 1.0})]
    assert bad.closed == 1
    assert notices == [
        "writer bad failed at step 2 and is off for the rest of the run: server is gone. "
        "metrics.jsonl has every value."
    ]
    writers.close()
    writers.close()
    assert (good.closed, bad.closed, late.closed) == (1, 1, 1)
    assert len(notices) == 2
    assert notices[1].startswith("writer late could not send everything: cannot flush.")


def test_interrupts_are_no_writer_failures() -> None:
    class Interrupted(Kept):
        def write(self, step: int, metrics: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        WriterSet({"a": Interrupted()}, print).write(1, {})


def test_a_writer_that_cannot_start_closes_the_others_and_stops_the_run() -> None:
    first, notices = Kept(), list[str]()

    def broken() -> Kept:
        raise RuntimeError("no account")

    with pytest.raises(ForgeError, match=r"writer second cannot start: no account") as caught:
        start_writers({"first": lambda: first, "second": broken}, notices.append)
    assert "[metrics.second]" in caught.value.hint
    assert first.closed == 1
    assert not notices


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_with_the_way_to_get_it(
    name: str, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    build: Any = {"wandb": wandb_writer, "mlflow": mlflow_writer}[name].build
    options = {"wandb": WandbOptions(), "mlflow": MlflowOptions()}[name]
    with pytest.raises(ForgeError, match=f"writer {name} cannot be loaded") as caught:
        start_writers({name: lambda: build(session, options)}, print)
    assert caught.value.hint == install_hint(name)
    assert caught.value.hint == f"pip install {'mlflow-skinny' if name == 'mlflow' else name}"
    assert not is_missing("tensorboard")
    assert not is_missing("somebody/else")


def test_configuration_as_writers_get_it(session: Any, tmp_path: Path) -> None:
    config = resolved_config(session.run.path)
    assert config["optimizer"]["betas"] == [0.9, 0.95]
    assert dict(flatten(config)) == {
        "run.name": "night",
        "optimizer.lr": 0.001,
        "optimizer.betas": [0.9, 0.95],
        "data.mix.0.name": "books",
    }
    assert resolved_config(tmp_path) == {}


# TensorBoard ------------------------------------------------------------------------------------------------


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard_files_read_back(session: Any) -> None:
    writer = tensorboard_writer.build(session, TensorboardOptions())
    for step in (1, 2, 3):
        writer.write(step, {"train/loss": 3.0 - step, "eval/loss": math.nan})
    writer.close()
    found = events(session.run.path / "tensorboard")
    assert found.Tags()["scalars"] == ["train/loss", "eval/loss"]
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [(1, 2.0), (2, 1.0), (3, 0.0)]
    assert all(math.isnan(e.value) for e in found.Scalars("eval/loss"))


def test_tensorboard_forgets_what_a_resumed_run_repeats(session: Any, tmp_path: Path) -> None:
    options = TensorboardOptions(dir=str(tmp_path / "elsewhere"))
    writer = tensorboard_writer.build(session, options)
    for step in range(1, 10):
        writer.write(step, {"train/loss": 1.0})
    writer.close()
    writer = tensorboard_writer.build(session, options)
    for step in range(7, 13):
        writer.write(step, {"train/loss": 2.0})
    writer.close()
    found = [(e.step, e.value) for e in events(tmp_path / "elsewhere").Scalars("train/loss")]
    assert found == [(s, 1.0) for s in range(1, 7)] + [(s, 2.0) for s in range(7, 13)]


# Weights & Biases -------------------------------------------------------------------------------------------


class FakeServer:
    """Keeps runs as the real server does: a value sent for a step below the greatest is dropped."""

    def __init__(self) -> None:
        self.runs: dict[str, FakeRun] = {}
        self.inits: list[dict[str, Any]] = []
        self.module = types.ModuleType("wandb")
        self.module.init = self.init  # type: ignore[attr-defined]

    def init(self, **options: Any) -> FakeRun:
        self.inits.append(options)
        run = self.runs.setdefault(options["id"], FakeRun())
        run.finished = None
        return run


class FakeRun:
    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.axes: dict[str, str | None] = {}
        self.greatest = -1
        self.finished: int | None = None

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        step = self.greatest + 1 if step is None else step
        if step < self.greatest:
            return
        self.greatest = step
        self.history.append(data)

    def finish(self, exit_code: int = 0) -> None:
        self.finished = exit_code

    def curve(self, name: str) -> dict[int, float]:
        axis = self.axes.get(name, self.axes.get("*"))
        assert axis is not None
        return {row[axis]: row[name] for row in self.history if name in row}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer()
    monkeypatch.setitem(sys.modules, "wandb", server.module)
    return server


def test_wandb_loses_nothing_after_a_resume(session: Any, server: FakeServer) -> None:
    writer = wandb_writer.build(session, WandbOptions())
    for step in range(1, 10):
        writer.write(step, {"train/loss": float(step)})
    # killed here; the run goes on from step 6
    writer = wandb_writer.build(session, WandbOptions())
    for step in range(7, 13):
        writer.write(step, {"train/loss": 100.0 + step})
        if step == 10:
            writer.write(step, {"eval/loss": 5.0})
    writer.close()
    assert len(server.runs) == 1
    (run,) = server.runs.values()
    assert len(run.history) == 9 + 6 + 1  # nothing dropped
    assert run.curve("train/loss") == {
        **{s: float(s) for s in range(1, 7)},
        **{s: 100.0 + s for s in range(7, 13)},
    }
    assert run.curve("eval/loss") == {10: 5.0}
    assert run.finished == 0


def test_wandb_gets_its_options_at_once(session: Any, server: FakeServer) -> None:
    options = WandbOptions(
        project="p", entity="e", name="n", group="g", tags=["t"], mode="offline", resume="never"
    )
    wandb_writer.build(session, options)
    (sent,) = server.inits
    assert sent.pop("id")
    assert sent == {
        "project": "p",
        "entity": "e",
        "name": "n",
        "group": "g",
        "tags": ["t"],
        "mode": "offline",
        "resume": "never",
        "dir": str(session.run.path),
        "config": resolved_config(session.run.path),
    }
    wandb_writer.build(session, WandbOptions())
    assert server.inits[1]["name"] == "night"


def test_wandb_resume_choices(session: Any, server: FakeServer) -> None:
    with pytest.raises(ForgeError, match="resume is 'must'"):
        wandb_writer.build(session, WandbOptions(resume="must"))
    for resume in ("allow", "must", "never", "allow"):
        wandb_writer.build(session, WandbOptions(resume=resume))
    ids = [init["id"] for init in server.inits]
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_wandb_that_starts_by_half_is_ended(
    session: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FakeRun, "define_metric", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("half started"))
    )
    with pytest.raises(ForgeError, match="writer wandb cannot start: half started"):
        start_writers({"wandb": lambda: wandb_writer.build(session, WandbOptions())}, print)
    (run,) = server.runs.values()
    assert run.finished == 1


# MLflow -----------------------------------------------------------------------------------------------------


class FakeStore:
    """The calls of an MLflow client that the writer makes."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.uris: list[str | None] = []
        self.failing = False
        self.module = types.ModuleType("mlflow")
        entity = lambda *fields: lambda *values: dict(zip(fields, values, strict=True))  # noqa: E731
        self.module.entities = types.SimpleNamespace(  # type: ignore[attr-defined]
            Metric=entity("key", "value", "timestamp", "step"), Param=entity("key", "value")
        )
        self.module.MlflowClient = self.client  # type: ignore[attr-defined]

    def client(self, tracking_uri: str | None = None) -> FakeStore:
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        found = self.experiments.get(name)
        return None if found is None else types.SimpleNamespace(experiment_id=found)

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = str(len(self.experiments))
        return self.experiments[name]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        ident = f"run{len(self.runs)}"
        self.runs[ident] = {
            "experiment": experiment,
            "name": run_name,
            "tags": tags,
            "metrics": [],
            "params": [],
            "status": "RUNNING",
        }
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=ident))

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        if self.failing:
            raise ConnectionError("server is gone")
        assert len(params) <= 100
        self.runs[run_id]["metrics"] += metrics
        self.runs[run_id]["params"] += params

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    store = FakeStore()
    monkeypatch.setitem(sys.modules, "mlflow", store.module)
    return store  # type: ignore[return-value]


def points(run: dict[str, Any], name: str) -> list[tuple[int, float]]:
    return [(m["step"], m["value"]) for m in run["metrics"] if m["key"] == name]


def test_mlflow_goes_on_with_its_run(session: Any, store: FakeStore) -> None:
    options = MlflowOptions(tracking_uri="file:x", experiment="exp", run_name="nightly", tags={"k": "v"})
    for begin, end in ((1, 4), (3, 6)):
        writer = mlflow_writer.build(session, options)
        for step in range(begin, end):
            writer.write(step, {"train/loss": step + begin / 10, "loss/a+b": 1})
        writer.close()
    assert store.uris == ["file:x", "file:x"]
    (run,) = store.runs.values()
    assert (run["name"], run["tags"], run["status"]) == ("nightly", {"k": "v"}, "FINISHED")
    assert points(run, "train/loss") == [(1, 1.1), (2, 2.1), (3, 3.1), (3, 3.3), (4, 4.3), (5, 5.3)]
    assert len(points(run, "loss/a_b")) == 6
    assert {p["key"]: p["value"] for p in run["params"]}["optimizer.betas"] == "[0.9, 0.95]"
    assert list(store.experiments) == ["exp"]


def test_mlflow_begins_anew_when_told_or_when_the_store_lost_the_run(session: Any, store: FakeStore) -> None:
    mlflow_writer.build(session, MlflowOptions()).close()
    mlflow_writer.build(session, MlflowOptions(resume=False)).close()
    assert len(store.runs) == 2
    store.runs.clear()
    mlflow_writer.build(session, MlflowOptions()).close()
    assert [run["name"] for run in store.runs.values()] == ["night"]


def test_mlflow_failure_surfaces_once_and_is_contained(session: Any, store: FakeStore) -> None:
    notices: list[str] = []
    kept = Kept()
    writer = mlflow_writer.build(session, MlflowOptions())
    writers = WriterSet({"mlflow": writer, "kept": kept}, notices.append)
    store.failing = True
    writers.write(1, {"a": 1.0})
    writer.sent[0].exception(timeout=10)
    for step in (2, 3):
        writers.write(step, {"a": 1.0})
    writers.close()
    assert len(notices) == 1
    assert notices[0].startswith(
        "writer mlflow failed at step 2 and is off for the rest of the run: server is gone"
    )
    assert len(kept.records) == 3


def test_mlflow_failure_of_the_last_record_is_told(session: Any, store: FakeStore) -> None:
    notices: list[str] = []
    writers = WriterSet({"mlflow": mlflow_writer.build(session, MlflowOptions())}, notices.append)
    store.failing = True
    writers.write(1, {"a": 1.0})
    writers.close()
    assert len(notices) == 1
    assert "mlflow could not send everything: server is gone" in notices[0]
    assert [run["status"] for run in store.runs.values()] == ["FAILED"]
