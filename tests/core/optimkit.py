"""What the tests of optimizers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forge_core.config.tables import OptimizerConfig
from forge_core.optim import build_optimizer, parameter_groups
from forge_core.optim.options import AdamWOptions, MuonOptions, ScheduleFreeOptions
from forge_core.testing.optimizers import ROLES, TinyModel

OPTIONS = {
    "adamw": AdamWOptions(),
    "lion": None,
    "muon": MuonOptions(),
    "schedule_free_adamw": ScheduleFreeOptions(),
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def built(
    name: str, options: Any = None, prepare: Callable[[TinyModel], Any] | None = None, **config: Any
) -> tuple[TinyModel, torch.optim.Optimizer]:
    """A tiny model and the core's optimizer `name` over it; `prepare` changes the model before."""
    torch.manual_seed(0)
    model = TinyModel()
    if prepare is not None:
        prepare(model)
    table = OptimizerConfig(name=name, **config)
    groups = parameter_groups(model.named_parameters(), ROLES, table, {})
    return model, build_optimizer(table, options, groups)


def give_gradients(params: Any, seed: int) -> None:
    for i, p in enumerate(params):
        p.grad = random(*p.shape, seed=100 * seed + i, dtype=p.dtype)
