"""One rank of benchmarks/pp.py: a step of a session with stages and a bare torch schedule, in turn."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

import forge_pp.plugin
from forge_core.loop.build import build_session, new_session
from forge_core.testing import isolated_plugins, tiny_config
from forge_pp.parts import StagedModel

VOCABULARY, LENGTH, ROWS, COUNT = 1024, 128, 4, 4
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Bare(nn.Module):
    """The same stage called by torch's schedule directly."""

    def __init__(self, part: Any, last: bool) -> None:
        super().__init__()
        self.part, self.last = part, last

    def forward(self, x: Tensor) -> Tensor:
        first = not x.is_floating_point()
        hidden: Tensor = self.part(x) if first else self.part(embeds=x)
        return self.part.head(hidden) if self.last else hidden


def bare_step(model: StagedModel, schedule: str) -> Callable[[Tensor, Tensor], None]:
    """A step over copies of the parts: schedule, global norm, clip, AdamW."""
    (number,), (part,) = model.stages, model.parts
    module = Bare(copy.deepcopy(part), last=number == 1)
    stage = PipelineStage(module, number, 2, torch.device("cpu"))
    total = ROWS * LENGTH * COUNT

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / total

    runner: Any = SCHEDULES[schedule](stage, COUNT, loss_fn=loss, scale_grads=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> None:
        if number == 0:
            runner.step(tokens)
        else:
            runner.step(target=targets, losses=[])
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        squares = torch.stack(torch._foreach_norm(grads)).square().sum()
        dist.all_reduce(squares)
        torch._foreach_mul_(grads, torch.clamp(1.0 / (squares.sqrt() + 1e-6), max=1.0))
        optimizer.step()
        optimizer.zero_grad()

    return step


def turns(schedule: str, pairs: int, width: int) -> list[list[float]]:
    """Seconds of each pair of steps, (forge, bare), on this rank."""
    plugins = isolated_plugins({"pp": forge_pp.plugin})
    config = tiny_config(
        plugins=plugins,
        pp={"size": 2, "schedule": schedule},
        model={
            "dim": width,
            "n_layers": 4,
            "n_heads": 4,
            "ffn_hidden_dim": 4 * width,
            "vocab_size": VOCABULARY,
        },
        train={"batch_size": ROWS, "seq_len": LENGTH, "grad_accum_steps": COUNT, "max_steps": 10_000},
        data={"synthetic": {"n_samples": 4096}},
        eval={"interval": 0},
    )
    with ExitStack() as stack:
        session = build_session(new_session(config, plugins, stack))
        session.freeze.apply(1)
        assert isinstance(session.model, StagedModel)
        bare = bare_step(session.model, schedule)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(VOCABULARY, (ROWS * COUNT, LENGTH), generator=generator)
        found = []
        for number in range(pairs + 2):
            sides: list[Callable[[], Any]] = [lambda: _forge(session), lambda: bare(tokens, tokens)]
            taken = [0.0, 0.0]
            for side in (0, 1) if number % 2 else (1, 0):
                dist.barrier()
                begin = time.perf_counter()
                sides[side]()
                dist.barrier()
                taken[side] = time.perf_counter() - begin
            found.append(taken)
    return found[2:]


def _forge(session: Any) -> None:
    session.step_fn.train(session, session.step + 1)
    session.step += 1
