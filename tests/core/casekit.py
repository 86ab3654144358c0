"""A run cut down to what a case needs: its own model, batches and optimizer, through the public hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core import hookimpl
from forge_core.commands.loading import load
from forge_core.contract import Alias, NamedOptimizer, Output
from forge_core.loop.build import build_session, new_session
from forge_core.loop.session import TrainingSession
from forge_core.plugins import Plugins
from forge_core.testing.tiny import processes


class ListData:
    """Micro-batches from a list, over and over."""

    def __init__(self, batches: Sequence[dict[str, Tensor]], evaluation: Sequence[Any] = ()) -> None:
        self.batches = list(batches)
        self.train = self
        self.evaluation = list(evaluation)
        self.tokenizer = None
        self.position = 0

    def take(self, count: int) -> list[dict[str, Tensor]]:
        taken = [self.batches[(self.position + i) % len(self.batches)] for i in range(count)]
        self.position += count
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]

    def __enter__(self) -> ListData:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def labelled(targets: Sequence[int], tokens: Sequence[int] | None = None) -> dict[str, Tensor]:
    """One row of aligned (input, label) pairs."""
    t = torch.tensor([list(targets)])
    return {"targets": t, "tokens": torch.zeros_like(t) if tokens is None else torch.tensor([list(tokens)])}


class Bias(nn.Module):
    """Logits of every token are one vector b of length 2, at first 0."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(2))

    def forge_reset(self, *_: Any, **__: Any) -> None:
        nn.init.zeros_(self.b)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.b.expand(*tokens.shape, 2)


class Rows(nn.Module):
    """The input token picks a row of logits: row 0 is (0, 0), row 1 is (0, ln 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2, 2))

    def forge_reset(self, *_: Any, **__: Any) -> None:
        with torch.no_grad():
            self.table.copy_(torch.tensor([[0.0, 0.0], [0.0, float(torch.tensor(3.0).log())]]))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


class Scalar(nn.Module):
    """One weight w; the loss of a micro-batch is w * mean(x), so its gradient is mean(x)."""

    start = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forge_reset(self, *_: Any, **__: Any) -> None:
        nn.init.constant_(self.w, self.start)


class LogitsForward:
    """Cross-entropy of a model that returns logits."""

    def count(self, batch: dict[str, Tensor]) -> dict[str, int]:
        return {"tokens": int((batch["targets"] != -100).sum()), "sequences": len(batch["targets"])}

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Output:
        logits = model(batch["tokens"])
        each = F.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none")
        return Output(loss_sum=each.sum(), token_loss=each.detach())


class ScalarForward:
    """Every micro-batch counts one token whose loss is w * mean(x)."""

    def count(self, batch: dict[str, Tensor]) -> dict[str, int]:
        return {"tokens": 1, "sequences": 1}

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Output:
        loss = model.w * batch["x"].mean()
        return Output(loss_sum=loss, token_loss=loss.detach())


def unit(x: float) -> dict[str, Tensor]:
    return {"x": torch.tensor([float(x)]), "tokens": torch.zeros(1, 1, dtype=torch.long)}


def case_plugin(
    model: Callable[[], nn.Module],
    data: ListData,
    forward: Any,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    schedule: Callable[[int], float] = lambda step: 1.0,
    **more: Any,
) -> Any:
    """A plugin whose family is the given model, data, forward and optimizer."""

    def build_optimizers(session: TrainingSession) -> dict[str, NamedOptimizer]:
        built = optimizer(list(session.freeze.ever_trainable().values()))
        for group in built.param_groups:
            group["initial_lr"] = group["lr"]
        return {"main": NamedOptimizer(optimizer=built, schedule=schedule)}

    class Plugin:
        forge_api = 1
        forge_tables = staticmethod(hookimpl(lambda: None, specname="forge_tables"))
        forge_build_decoder = staticmethod(hookimpl(lambda: model(), specname="forge_build_decoder"))
        forge_build_data = staticmethod(hookimpl(lambda: data, specname="forge_build_data"))
        forge_build_forward = staticmethod(hookimpl(lambda: forward, specname="forge_build_forward"))
        forge_module_aliases = staticmethod(
            hookimpl(lambda: [Alias(name="all", patterns=("*",))], specname="forge_module_aliases")
        )

    for name, function in {"forge_build_optimizers": build_optimizers, **more}.items():
        setattr(Plugin, name, staticmethod(hookimpl(specname=name)(function)))
    return Plugin()


@contextlib.contextmanager
def case_session(
    folder: Path, plugin: Any, *flags: str, extra: Mapping[str, Any] | None = None
) -> Iterator[TrainingSession]:
    """A built session over `plugin`; its metrics go to `folder`/case."""
    plugins = Plugins.isolated({"case": plugin, **(extra or {})})
    tables = [f"--{name}=true" for name in ("case", *(extra or {}))]
    quiet = ["--metrics.progress=off", "--metrics.log_interval=1", "--eval.at_end=false"]
    config, plugins = load(
        None,
        [f"--run.dir={folder}", "--run.name=case", *quiet, *tables, *flags],
        world_size=processes(),
        plugins=plugins,
    )
    with contextlib.ExitStack() as stack:
        session = new_session(config, plugins, stack)
        build_session(session)
        session.run.create()
        session.metrics.start(0)
        stack.callback(session.metrics.close)
        yield session


def sgd(lr: float) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)
