"""What `forge explain` says of schedules: the simulation against theory and against stages that sleep."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ppkit import BASE, merged, plugins_of
from torch import Tensor, nn

from forge_core.commands.explain import page
from forge_core.errors import ForgeError
from forge_core.loop.explain import explain
from forge_core.testing import WorkerPool, tiny_config, tiny_session
from forge_pp.draw import drawing
from forge_pp.explain import lines
from forge_pp.orders import Action, Order, read_csv
from forge_pp.schedules import SCHEDULES
from forge_pp.simulate import Durations, expected_bubble, expected_peak, simulate
from forge_pp.torch_orders import torch_order

SIZES = [(2, 8), (4, 16), (8, 64), (16, 128)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("size", "count"), SIZES)
def test_bubble_and_activations_are_those_of_theory(schedule: str, size: int, count: int) -> None:
    stages = SCHEDULES[schedule].stages
    order = torch_order(schedule, size, stages, count)
    assert list(order.problems(size, size * stages, count)) == []
    found = simulate(order)
    assert found.bubble == pytest.approx(expected_bubble(schedule, size, stages, count), rel=0.02)
    peaks = tuple(expected_peak(schedule, size, stages, count, rank) for rank in range(size))
    assert found.peaks == peaks


def test_by_hand() -> None:
    # 1F1B of two ranks and two micro-batches, F = I = W = 1:
    #   rank 0: F0 F1 .  B0 B0 .  B1 B1      rank 1 begins at 1: F0 B0 B0 F1 B1 B1
    #   rank 1: .  F0 B0 B0 F1 B1 B1         rank 0's B0 may start at 4 (after rank 1's, at 2..4), B1 at 7
    found = simulate(torch_order("1f1b", 2, 1, 2))
    assert [(str(t.action), t.start, t.end) for t in found.ranks[0]] == [
        ("0F0", 0, 1),
        ("0F1", 1, 2),
        ("0B0", 4, 6),
        ("0B1", 7, 9),
    ]
    assert found.total == 9
    assert found.bubble == pytest.approx(1 - 12 / 18)


def test_unequal_stages_and_travel() -> None:
    durations = Durations(forward=1, inputs=1, weights=1, travel=0.5, of_stage=lambda stage: 1.0 + stage)
    # F0 of stage 0 till 1, travels till 1.5, F0 of stage 1 takes 2 till 3.5, backward 4 till 7.5, back at 8
    found = simulate(torch_order("gpipe", 2, 1, 1), durations)
    assert [(t.start, t.end) for row in found.ranks for t in row] == [(0, 1), (8, 10), (1.5, 3.5), (3.5, 7.5)]


def test_orders_that_never_end() -> None:
    order = Order(((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "B", 0), Action(1, "F", 0))))
    with pytest.raises(ForgeError, match="never ends"):
        simulate(order)


def test_a_drawing() -> None:
    assert list(drawing(simulate(torch_order("1f1b", 2, 1, 2)), 2)) == [
        "rank 0  F0 F1 .  .  B0 B0 .  B1 B1",
        "rank 1  .  F0 B0 B0 F1 B1 B1 .  .",
    ]


def test_explain_draws_the_schedule() -> None:
    tables = merged(BASE, {"pp": {"size": 2, "schedule": "zbv"}})
    plugins = plugins_of(tables)
    text = "\n".join(page(explain(tiny_config(plugins=plugins, **tables), plugins)))
    assert "stages     zbv: 4 stages on 2 ranks, 4 micro-batches; 4.0 % of the ranks' time is waiting" in text
    assert "stage 3 on rank 0: block 3" in text
    assert "rank 1  " in text


def test_explain_counts_one_as_one() -> None:
    tables = merged(BASE, {"train": {"grad_accum_steps": 1}, "pp": {"size": 2, "schedule": "gpipe"}})
    plugins = plugins_of(tables)
    text = "\n".join(page(explain(tiny_config(plugins=plugins, **tables), plugins)))
    assert "stages     gpipe: 2 stages on 2 ranks, 1 micro-batch; " in text
    assert "at most 1 micro-batch of a stage" in text
    one = merged(BASE, {"pp": {"size": 1, "schedule": "gpipe"}})
    with tiny_session(tiny_config(plugins=plugins, **one), plugins) as session:
        assert "gpipe: 1 stage on 1 rank, 4 micro-batches; " in next(lines(session))


def test_files_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    order = read_csv(path)
    assert order.owners == {0: 0, 1: 1}
    assert list(order.problems(2, 2, 2)) == []
    assert simulate(order).peaks == (2, 1)


class Nap(torch.autograd.Function):
    """Identity whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    """A stage that sleeps: forward, backward of inputs and of its weight take the same time each."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        weight: Tensor = Nap.apply(self.weight, self.seconds)  # type: ignore[no-untyped-call]
        given: Tensor = Nap.apply(x, self.seconds)  # type: ignore[no-untyped-call]
        return given + weight


def asleep(schedule: str, count: int, seconds: float) -> float:
    """Seconds of a step over sleeping stages on this rank."""
    import torch.distributed as dist

    from forge_pp.window import Line, Window

    known, group = SCHEDULES[schedule], dist.group.WORLD
    assert group is not None
    stages = 2 * known.stages
    parts: dict[int, nn.Module] = {s: Sleeper(seconds) for s in known.stages_of(group.rank(), 2, stages)}
    owners = {stage: known.owner(stage, 2) for stage in range(stages)}
    line = Line(
        schedule=schedule, parts=parts, count=stages, owners=owners, device=torch.device("cpu"), group=group
    )

    def run(stage: int, number: int, came: tuple[Tensor, ...]) -> Any:
        x = came[0] if came else torch.zeros(4, requires_grad=True)
        given = parts[stage](x)
        return given.square().sum() if stage == stages - 1 else (given,)

    window = Window(line, run)
    travelling = [(torch.empty(4, device="meta"),)] * count
    window(travelling)
    dist.barrier()
    begin = time.perf_counter()
    window(travelling)
    dist.barrier()
    return time.perf_counter() - begin


@pytest.mark.alone
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sleeping_stages_take_the_simulated_time(schedule: str, pool2: WorkerPool) -> None:
    seconds, count = 0.03, 4
    taken = max(pool2.run(asleep, schedule, count, seconds))
    simulated = simulate(torch_order(schedule, 2, SCHEDULES[schedule].stages, count)).total * seconds
    assert taken == pytest.approx(simulated, rel=0.1)
