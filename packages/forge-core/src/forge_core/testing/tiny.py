"""Runs so small that a test can afford dozens: two layers of width 16, sequences of 16 tokens, a CPU."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import tomli_w

from forge_core.config import Config
from forge_core.contract.runtime import Observer
from forge_core.plugins import Plugins
from forge_core.testing.objects import isolated_plugins, plugin_object

if TYPE_CHECKING:
    from torch import Tensor, nn

    from forge_core.contract import StepResult
    from forge_core.loop.session import TrainingSession

TINY: dict[str, dict[str, Any]] = {
    "model": {"dim": 16, "n_layers": 2, "n_heads": 2, "ffn_hidden_dim": 32},
    "data": {"source": "synthetic", "synthetic": {"n_samples": 256}},
    "train": {"batch_size": 2, "seq_len": 16, "max_steps": 3, "device": "cpu", "dtype": "fp32", "seed": 1},
    "optimizer": {"lr": 1e-2},
    "eval": {"steps": 1},
    "metrics": {"log_interval": 1, "progress": "off"},
}
VOCABULARY = 64


def tiny_config(
    *flags: str,
    plugins: Plugins | None = None,
    world_size: int | None = None,
    **tables: Mapping[str, Any] | bool,
) -> Config:
    """A small configuration, with the given tables laid over it key by key.

    Args:
        flags: `--table.key=value`, laid over the tables.
        plugins: those whose tables may be named; none by default. The ones that are named get loaded.
        world_size: processes that are to run it; by default those of the process group, else the fewest that
            the mesh can run on.
        tables: `train={"max_steps": 5}, mine={"weight": 0.1}, other=True`.

    Raises:
        ConfigError: as `forge check` would.
    """
    from forge_core.commands.loading import load

    merged = _merge(TINY, tables)
    if merged["data"].get("mix"):  # which names its own sources
        del merged["data"]["source"]
    if merged["data"].get("source", "synthetic") == "synthetic":
        merged["model"].setdefault("vocab_size", VOCABULARY)
    with tempfile.TemporaryDirectory(prefix="forge-tiny-") as folder:
        path = Path(folder) / "tiny.toml"
        path.write_text(tomli_w.dumps(merged), encoding="utf-8")
        world = world_size or processes()
        config, _ = load(str(path), flags, world_size=world, plugins=plugins or isolated_plugins())
    return config


def processes() -> int | None:
    """Processes of the group that this one is in; None if it is in none."""
    if "torch" not in sys.modules:
        return None
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else None


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = {
        name: _merge(value, {}) if isinstance(value, Mapping) else value for name, value in below.items()
    }
    for name, value in above.items():
        if isinstance(value, Mapping):
            base = merged.get(name)
            merged[name] = _merge(base if isinstance(base, Mapping) else {}, value)
        else:
            merged[name] = value
    return merged


@contextmanager
def undisturbed() -> Iterator[None]:
    """One thread, as several only get in each other's way with small tensors, and an own random state.

    Both are afterwards what they were before.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def tiny_session(config: Config | None = None, plugins: Plugins | None = None) -> Iterator[TrainingSession]:
    """A built session that has not trained yet; nothing is written."""
    from forge_core.loop.build import build_session, new_session

    plugins = plugins or isolated_plugins()
    with ExitStack() as stack, undisturbed():
        yield build_session(new_session(config or tiny_config(plugins=plugins), plugins, stack))


def tiny_model(config: Config | None = None, plugins: Plugins | None = None) -> nn.Module:
    """The model of a session, with its initial values."""
    with tiny_session(config, plugins) as session:
        return session.model


@attrs.frozen(kw_only=True, eq=False)
class TinyRun:
    """What a run left behind.

    Attributes:
        status: exit status.
        losses, objectives, grad_norms: one number an update.
        oks: whether each update happened.
        records: the lines of metrics.jsonl.
        weights: parameters by global name, copies.
        folder: the run folder; removed with this object unless `run_tiny` was given a folder.
        session: as it was at the end, its data closed.
    """

    status: int
    losses: list[float]
    objectives: list[float]
    grad_norms: list[float]
    oks: list[bool]
    records: list[dict[str, Any]]
    weights: dict[str, Tensor]
    folder: Path
    session: TrainingSession

    def metric(self, name: str) -> list[float]:
        """The values of a metric, one a record that has it."""
        return [record[name] for record in self.records if name in record]


def run_tiny(
    config: Config | None = None,
    plugins: Plugins | None = None,
    *,
    steps: int | None = None,
    folder: str | Path | None = None,
) -> TinyRun:
    """Train in this process, from the configuration to `exit.json`, as `forge train` does.

    On several ranks (of a `WorkerPool`) all call it alike; weights are the whole parameters on each.

    Args:
        config: of `tiny_config` by default.
        plugins: those that `config` was loaded with; none by default.
        steps: replaces `train.max_steps`.
        folder: holds the run folder; by default a temporary one.

    Raises:
        Whatever the run raises.
    """
    from forge_core.loop.run import train

    plugins = plugins or isolated_plugins()
    config = config or tiny_config(plugins=plugins)
    place = _new_folder() if folder is None else Path(folder)
    changes: dict[str, Any] = {"run": attrs.evolve(config.get("run"), dir=str(place))}
    if steps is not None:
        changes["train"] = attrs.evolve(config.get("train"), max_steps=steps)
    recorder = Recorder()
    try:
        with undisturbed():
            status = train(config.replace(**changes), watched(plugins, recorder))
        run = recorder.result(status)
        run.session.check_stop()  # every rank has read what one of them is about to remove
    except BaseException:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)
        raise
    if folder is None and run.session.ranks.is_main:
        weakref.finalize(run, shutil.rmtree, place, ignore_errors=True)
    return run


def _new_folder() -> Path:
    """A temporary folder, the same one on all ranks."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return Path(tempfile.mkdtemp(prefix="forge-tiny-"))
    found = [tempfile.mkdtemp(prefix="forge-tiny-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(found)
    return Path(found[0])


class Recorder(Observer):
    """Keeps the numbers of every update; reading them is a host sync, which a test can afford."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.objectives: list[float] = []
        self.grad_norms: list[float] = []
        self.oks: list[bool] = []

    def train_begin(self, session: TrainingSession) -> None:
        self.session = session

    def step_end(self, session: TrainingSession, step: int, result: StepResult) -> None:
        self.losses.append(float(result.loss))
        self.objectives.append(float(result.objective))
        self.grad_norms.append(float(result.grad_norm))
        self.oks.append(bool(result.ok))

    def result(self, status: int) -> TinyRun:
        session = self.session
        lines = session.run.metrics.read_text(encoding="utf-8").splitlines()
        return TinyRun(
            status=status,
            losses=self.losses,
            objectives=self.objectives,
            grad_norms=self.grad_norms,
            oks=self.oks,
            records=[json.loads(line) for line in lines],
            weights={name: _whole(p) for name, p in session.freeze.named.items()},
            folder=session.run.path,
            session=session,
        )


def _whole(parameter: Tensor) -> Tensor:
    """A copy of the whole parameter, of which this rank may hold a part."""
    tensor: Any = parameter.detach()
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.clone()


def watched(plugins: Plugins, observer: Observer) -> Plugins:
    """The same plugins with one more observer, which counts as the core's."""
    from forge_core.builtin import BUILTINS

    extra = plugin_object(forge_observers=lambda: [observer])
    copy = Plugins(installed=plugins.installed, builtins=[*BUILTINS, extra], blocked=plugins.blocked)
    copy.loaded = plugins.loaded
    return copy
