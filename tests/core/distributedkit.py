"""Runs on several ranks, beside the same run in one process. Its functions run in the workers of a pool."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from casekit import ListData

from forge_core.contract import Component, Transform
from forge_core.data.source import SourceSpec
from forge_core.errors import DataError
from forge_core.plugins import Plugins
from forge_core.testing import TinyRun, isolated_plugins, plugin_object, run_tiny, tiny_config

ROWS = 96


class MaskedRows:
    """Rows of random tokens; of one row in three nothing is supervised, of the others an uneven part."""

    def __init__(self, spec: SourceSpec, options: object) -> None:
        generator = np.random.default_rng(5)
        self.tokens = generator.integers(0, spec.vocab_size, (ROWS, spec.seq_len + 1))
        chances = np.where(np.arange(ROWS) % 3 == 0, 0.0, generator.uniform(0.1, 1.0, ROWS))
        self.kept = generator.uniform(size=(ROWS, spec.seq_len)) < chances[:, None]
        self.fingerprint = f"masked {spec.seq_len}"

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = self.kept.shape[1]
        targets = np.where(self.kept[index], self.tokens[index, 1:], -100)
        return {
            "tokens": self.tokens[index, :-1],
            "targets": targets,
            "positions": np.arange(length),
            "documents": np.zeros(length, dtype=np.int32),
        }


def masked_rows(spec: SourceSpec, options: object) -> MaskedRows:
    return MaskedRows(spec, options)


def beyond_rows(spec: SourceSpec, options: object) -> MaskedRows:
    """The rows, one of which holds a token id that no model of the kit has; only reading it shows that."""
    rows = MaskedRows(spec, options)
    rows.tokens[7, 3] = 99
    return rows


def plugins_of(**hooks: Any) -> Plugins:
    """A plugin "kit" with the rows as data sources "kit/masked" and "kit/beyond", and further hooks."""
    sources = [
        Component(category="data_source", name=name, target=f"distributedkit:{name}_rows")
        for name in ("masked", "beyond")
    ]
    return isolated_plugins({"kit": plugin_object(forge_components=sources, **hooks)})


TABLES: dict[str, Any] = {
    "data": {"source": "kit/masked", "holdout": 0.0},
    "model": {"vocab_size": 40},
    "eval": {"at_end": False},
}


@attrs.frozen
class Outcome:
    """What a run came to; the same on every rank."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Any]

    @classmethod
    def of(cls, run: TinyRun) -> Outcome:
        return cls(run.losses, run.grad_norms, run.weights)


def train(
    layout: dict[str, Any], batch_size: int, accumulate: int, dtype: str, steps: int, **more: Any
) -> TinyRun:
    """Train the rows on this rank's part of `layout`."""
    plugins = plugins_of()
    settings = {
        "batch_size": batch_size,
        "grad_accum_steps": accumulate,
        "dtype": dtype,
        "max_steps": steps,
        "seq_len": 8,
    }
    tables = {**TABLES, **more}
    config = tiny_config(plugins=plugins, kit=True, distributed=layout, train=settings, **tables)
    return run_tiny(config, plugins)


def outcome(layout: dict[str, Any], batch_size: int, accumulate: int, dtype: str, steps: int) -> list[Any]:
    """`train`, as plain data."""
    return list(attrs.astuple(Outcome.of(train(layout, batch_size, accumulate, dtype, steps)), recurse=False))


def acting(action: Callable[[int], None]) -> Callable[[Any], Any]:
    """`forge_model_transforms` that calls `action(n)` before the n-th forward of the model, from 1."""

    def transforms(session: Any) -> list[Transform]:
        calls = itertools.count(1)

        def apply(model: Any) -> Any:
            model.register_forward_pre_hook(lambda *_: action(next(calls)))
            return model

        return [Transform(phase="adapt", name="act", apply=apply)]

    return transforms


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def boom(call: int) -> None:
    if rank() == 1 and call == 2:
        raise ValueError("boom")


def hang(call: int) -> None:
    if rank() == 1 and call == 3:
        time.sleep(60)


def die(call: int) -> None:
    if rank() == 1 and call == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def die_unnoticed(call: int) -> None:
    """Rank 1 dies while rank 0 is busy with itself."""
    if call == 2:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def die_at_the_meeting() -> None:
    """Rank 1 dies after it has come, before the groups are made for which all wait."""
    from forge_core.distributed import process_group

    if rank() == 1:
        module: Any = process_group.dist  # type: ignore[attr-defined]
        module.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)


def nothing(call: int) -> None:
    """Goes well."""


def slow_start(call: int) -> None:
    """Takes longer for its first step than a later one may, as compiling does."""
    if rank() == 1 and call == 1:
        time.sleep(6)


def ending() -> ListData:
    """Batches that rank 1 runs out of after three updates, and others after five."""

    class Ending(ListData):
        def take(self, count: int) -> list[dict[str, torch.Tensor]]:
            if self.position == (3 if rank() == 1 else 5):
                raise DataError(f"the data ends after {self.position} batches", "give more")
            return super().take(count)

    row = torch.arange(8).expand(2, 8)
    return Ending([{"tokens": row, "targets": row, "positions": row}])


def signalled(call: int) -> None:
    if rank() == 1 and call == 3:
        os.kill(os.getpid(), signal.SIGTERM)


def launched(action: str, folder: str, *flags: str) -> None:
    """A rank as a launcher starts it, with the errors that the command line prints.

    Args:
        action: what happens in its forward; or "ending" for data that ends, or "die_at_the_meeting".
    """
    from forge_core.commands.main import error_text
    from forge_core.errors import ForgeError
    from forge_core.launch.worker import place
    from forge_core.loop.run import train as run_it

    if action == "die_at_the_meeting":
        die_at_the_meeting()
        action = "nothing"
    if action == "ending":
        plugins = plugins_of(forge_build_data=ending)
    else:
        plugins = plugins_of(forge_model_transforms=acting(globals()[action]))
    settings = {"batch_size": 2, "seq_len": 8, "max_steps": 10 if action == "ending" else 4}
    run = {"dir": folder, "name": "run"}
    try:
        config = tiny_config(
            *flags, plugins=plugins, world_size=2, kit=True, run=run, train=settings, **TABLES
        )
        sys.exit(run_it(config, plugins))
    except Exception as error:
        print(f"error: {place()}{error_text(error)}", file=sys.stderr, flush=True)
        os._exit(error.exit_status if isinstance(error, ForgeError) else 1)


def stops(limit: int, action: str = "signalled") -> list[Any]:
    """A run whose rank 1 gets a signal in the forward of update 3: status, updates done, losses, ..."""
    plugins = plugins_of(forge_model_transforms=acting(globals()[action]))
    settings = {"batch_size": 2, "seq_len": 8, "max_steps": limit}
    even = {"name": "constant"}  # a rate that does not depend on the number of updates
    config = tiny_config(plugins=plugins, kit=True, train=settings, scheduler=even, **TABLES)
    run = run_tiny(config, plugins)
    return [run.status, run.session.step, run.losses, run.session.stop.received, dict(run.weights)]


def stops_in_evaluation() -> list[Any]:
    """The signal comes to rank 1 before batch 3 of an evaluation of 100 batches, a tenth of a second each."""
    seen: list[int] = []

    def action(call: int) -> None:
        if call > 1:  # update 1 is the first
            seen.append(call)
            time.sleep(0.1)
            if rank() == 1 and call == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    plugins = plugins_of(forge_model_transforms=acting(action))
    tables = {
        **TABLES,
        "data": {"source": "synthetic", "synthetic": {"n_samples": 4096}, "holdout": 0.5},
        "eval": {"interval": 1, "steps": 100, "batch_size": 2},
        "train": {"batch_size": 2, "seq_len": 8, "max_steps": 5},
    }
    config = tiny_config(plugins=plugins, kit=True, **tables)
    begin = time.monotonic()
    run = run_tiny(config, plugins)
    evaluated = any("eval/loss" in record for record in run.records)
    return [run.status, run.session.step, len(seen), evaluated, time.monotonic() - begin]


def evaluated(layout: dict[str, Any], batch_size: int, steps: int) -> float:
    """Loss on the same held-out samples after one update."""
    plugins = plugins_of()
    tables = {
        **TABLES,
        "data": {"source": "kit/masked", "holdout": 0.1},
        "eval": {"at_end": True, "steps": steps, "batch_size": batch_size},
        "train": {"batch_size": batch_size, "seq_len": 8, "max_steps": 1, "dtype": "fp64"},
        "optimizer": {"lr": 1e-9},  # so that the weights are those of another batch size, too
    }
    run = run_tiny(tiny_config(plugins=plugins, kit=True, distributed=layout, **tables), plugins)
    [loss] = run.metric("eval/loss")
    return loss


def differing(flags: dict[str, str], versions: bool = False) -> str:
    """The error of ranks that are not about to run the same."""
    from forge_core.errors import ForgeError

    if versions and rank() == 1:
        import forge_core.distributed.fingerprint as module

        module.__version__ = "1.2.3"
    plugins = plugins_of()
    mine = [f"--{name}={value}" for name, value in flags.items()] if rank() == 1 else []
    try:
        run_tiny(tiny_config(*mine, plugins=plugins, kit=True, **TABLES), plugins)
    except ForgeError as error:
        return error.message
    finally:
        if versions and rank() == 1:
            from forge_core.version import __version__

            module.__version__ = __version__
    return ""


def bad_steps(action: str, steps: int, folder: str) -> list[Any]:
    """Losses of rank 1 are infinite from update 3 on: what every rank made of it."""
    from forge_core.errors import GuardError

    def poisoned(call: int) -> None:
        poison.append(rank() == 1 and call >= 3)

    poison: list[bool] = []

    class Poison:
        def __init__(self, forward: Any) -> None:
            self.forward, self.count = forward, forward.count

        def __call__(self, model: Any, batch: Any) -> Any:
            output = self.forward(model, batch)
            if poison[-1]:
                output.loss_sum = output.loss_sum * float("inf")
            return output

    def build_forward(session: Any) -> Any:
        from forge_core.model.forward import TextForward

        return Poison(TextForward(session))

    plugins = plugins_of(forge_model_transforms=acting(poisoned), forge_build_forward=build_forward)
    settings = {"batch_size": 2, "seq_len": 8, "max_steps": steps}
    guard = {"action": action, "max_consecutive": 2}
    run = {"name": "bad"}
    tables = {"train": settings, "guard": guard, "run": run, "scheduler": {"name": "constant"}, **TABLES}
    config = tiny_config(plugins=plugins, kit=True, **tables)
    try:
        run_tiny(config, plugins, folder=folder)
    except GuardError as error:
        return ["GuardError", error.message]
    return ["none", ""]


def with_terms(layout: dict[str, Any], batch_size: int, accumulate: int) -> list[Any]:
    """A run with a loss term and a loss attached in a block: objectives, losses, and two metrics."""
    from forge_core import attach_loss
    from forge_core.contract import LossTerm, Metric

    def attaching(session: Any) -> list[Transform]:
        def attach(module: Any, inputs: Any, output: Any) -> Any:
            return attach_loss(output, 0.01 * output.square().sum(), "size", per="positions")

        def apply(model: Any) -> Any:
            next(iter(model.layers.values())).register_forward_hook(attach)
            return model

        return [Transform(phase="modify", name="attach", apply=apply)]

    def square(model: Any, batch: Any, output: Any) -> Any:
        return output.hidden.square().sum()

    plugins = plugins_of(
        forge_model_transforms=attaching,
        forge_extra_losses=lambda: [LossTerm(name="square", weight=0.1, term=square, per="positions")],
        forge_extra_metrics=lambda: [Metric(name="kit/ranks", op="sum", read=lambda: torch.ones(()))],
    )
    settings = {
        "batch_size": batch_size,
        "grad_accum_steps": accumulate,
        "dtype": "fp64",
        "max_steps": 4,
        "seq_len": 8,
    }
    config = tiny_config(plugins=plugins, kit=True, distributed=layout, train=settings, **TABLES)
    run = run_tiny(config, plugins)
    return [
        run.objectives,
        run.losses,
        run.metric("loss/square"),
        run.metric("size") or run.metric("loss/size"),
        run.metric("kit/ranks"),
    ]


def differing_model() -> str:
    """The error where rank 1's plugin adds a parameter and a metric."""
    from forge_core.contract import Metric
    from forge_core.errors import ForgeError

    def transforms(session: Any) -> list[Transform]:
        def apply(model: Any) -> Any:
            model.more = torch.nn.Parameter(torch.zeros(3))
            return model

        return [Transform(phase="adapt", name="more", apply=apply)] if rank() else []

    plugins = plugins_of(
        forge_model_transforms=transforms,
        forge_extra_metrics=lambda: [Metric(name="kit/more", op="sum", read=lambda: None)] if rank() else [],
    )
    try:
        run_tiny(tiny_config(plugins=plugins, kit=True, **TABLES), plugins)
    except ForgeError as error:
        return error.message
    return ""


def sampled(layout: dict[str, Any]) -> str:
    """What the model writes after a run of two updates."""
    from forge_core.contract.runtime import Observer
    from forge_core.loop.evaluate import evaluating

    class Write(Observer):
        text = ""

        def train_end(self, session: Any, step: int, reason: str) -> None:
            with evaluating(session):
                self.text = session.generator.sample(session)

    writer = Write()
    plugins = plugins_of(forge_observers=lambda: [writer])
    tables = {
        "model": {"vocab_size": 300},
        "data": {"source": "kit/masked", "holdout": 0.1},
        "eval": {"at_end": False, "sample_tokens": 12, "sample_prompt": "def "},
        "train": {"batch_size": 4, "seq_len": 32, "max_steps": 1, "dtype": "fp64"},
        "optimizer": {"lr": 1e-9},
    }
    run_tiny(tiny_config(plugins=plugins, kit=True, distributed=layout, **tables), plugins)
    return writer.text
