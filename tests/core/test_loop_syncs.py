"""The host reads nothing from the device on a step that does not log, and little on one that does; nothing
piles up."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core import attach_loss, run_training_loop
from forge_core.commands.loading import load
from forge_core.contract import LossTerm, Transform
from forge_core.loop.build import build_session, new_session
from forge_core.loop.session import TrainingSession
from forge_core.plugins import Plugins
from forge_core.testing import isolated_plugins, plugin_object

FLAGS = (
    "--model.dim=16",
    "--model.n_layers=2",
    "--model.n_heads=2",
    "--model.ffn_hidden_dim=32",
    "--model.vocab_size=64",
    "--data.source=synthetic",
    "--train.seq_len=8",
    "--train.batch_size=2",
    "--eval.at_end=false",
    "--metrics.progress=off",
)
aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default)


class Reads(TorchDispatchMode):
    """Counts reads of tensors by the host. The step counters of AdamW are CPU scalars on every device: no
    reads."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.count += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def tiny_session(folder: Path, *flags: str, plugins: Plugins | None = None) -> Iterator[TrainingSession]:
    plugins = plugins or Plugins.isolated()
    config, plugins = load(None, [*FLAGS, f"--run.dir={folder}", *flags], plugins=plugins)
    with contextlib.ExitStack() as stack:
        session = build_session(new_session(config, plugins, stack))
        session.run.create()
        session.metrics.start(0)
        stack.callback(session.metrics.close)
        yield session


@pytest.mark.parametrize("accumulate", [1, 8])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lion"])
def test_no_read_on_a_step_that_does_not_log(tmp_path: Path, accumulate: int, optimizer: str) -> None:
    flags = (
        "--train.max_steps=20",
        f"--train.grad_accum_steps={accumulate}",
        "--metrics.log_interval=5",
        f"--optimizer.name={optimizer}",
    )
    reads: dict[int, int] = {}
    with tiny_session(tmp_path, *flags) as session, Reads() as mode:

        def at_end(s: Any, step: int, result: Any) -> None:
            reads[step] = mode.count
            mode.count = 0

        session.events["step_end"] = (at_end,)
        log = session.metrics.log

        def counted(step: int, result: Any) -> None:
            mode.count = 0
            log(step, result)
            logged[step] = mode.count
            mode.count = 0

        logged: dict[int, int] = {}
        session.metrics.log = counted  # type: ignore[method-assign]
        run_training_loop(session)
    assert {step: n for step, n in reads.items() if n} == {}
    assert sorted(logged) == [1, 5, 10, 15, 20]
    assert max(logged.values()) <= 2


def with_further_losses() -> Plugins:
    """A plugin "more" with a loss term, and a loss attached in every block."""

    def attach(module: Any, inputs: Any, output: Any) -> Any:
        return attach_loss(output, 0.01 * output.square().sum(), "size", per="positions")

    def apply(model: Any) -> Any:
        for block in model.layers.values():
            block.register_forward_hook(attach)
        return model

    def square(model: Any, batch: Any, output: Any) -> Any:
        return output.hidden.square().sum()

    plugin = plugin_object(
        forge_model_transforms=lambda: [Transform(phase="modify", name="attach", apply=apply)],
        forge_extra_losses=lambda: [LossTerm(name="square", weight=0.1, term=square, per="positions")],
    )
    return isolated_plugins({"more": plugin})


def test_nothing_that_outlives_an_update_carries_a_graph(tmp_path: Path) -> None:
    """200 updates of two micro-batches with further losses, logged every 50."""
    live: dict[int, int] = {}
    first: list[Any] = []
    graphs: list[bool] = []
    flags = (
        "--train.max_steps=200",
        "--train.grad_accum_steps=2",
        "--metrics.log_interval=50",
        "--more=true",
    )
    with tiny_session(tmp_path, *flags, "--more=true", plugins=with_further_losses()) as session:

        def watch(s: Any, step: int, result: Any) -> None:
            graphs.append(
                any(t.grad_fn is not None for t in (result.loss, result.objective, result.grad_norm))
            )
            if step == 1:
                first.append(weakref.ref(result.loss))
            if step in (20, 200):
                gc.collect()
                tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
                live[step] = sum(t.grad_fn is not None for t in tensors)
            if step == 3:
                gc.collect()
                assert first[0]() is None

        session.events["step_end"] = (watch,)
        run_training_loop(session)
    assert len(graphs) == 200
    assert not any(graphs)
    assert live[20] == live[200]
