"""Small runs on two ranks whose numbers are worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from casekit import (
    Bias,
    ListData,
    LogitsForward,
    case_plugin,
    case_session,
    labelled,
    sgd,
)
from torch import Tensor, nn

from forge_core import run_training_loop
from forge_core.contract import Alias, Output
from forge_core.metrics.jsonl import read_records
from forge_core.testing import WorkerPool

NO_CLIP = "--train.grad_clip_norm=0"
LAYOUTS = ["--distributed.dp_shard=2", "--distributed.dp_replicate=2"]


def whole(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def a_rank_without_a_token(folder: str, layout: str) -> list[Any]:
    """Rank 0 has two tokens of label 0, rank 1 two that count for nothing; then nobody has any."""
    mine = labelled([0, 0]) if dist.get_rank() == 0 else labelled([-100, -100])
    data = ListData([mine, labelled([-100, -100])])
    plugin = case_plugin(Bias, data, LogitsForward(), sgd(1.0))
    seen: list[Any] = []
    with case_session(Path(folder), plugin, NO_CLIP, "--train.max_steps=2", layout) as session:

        def watch(s: Any, step: int, result: Any) -> None:
            seen.append([float(result.loss), bool(result.ok), whole(s.model.b), s.guard.skipped])

        session.events["step_end"] = (watch,)
        run_training_loop(session)
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_and_a_step_without_a_supervised_token(pool2: WorkerPool, tmp_path: Path, layout: str) -> None:
    for first, second in pool2.run(a_rank_without_a_token, str(tmp_path), layout):
        # gradient (-0.5, +0.5) of each of the two tokens, over their count 2
        assert first[:2] == [pytest.approx(math.log(2), abs=1e-6), True]
        torch.testing.assert_close(first[2], torch.tensor([0.5, -0.5]))
        assert first[3] == 0
        assert second[0] == 0.0
        assert second[1] is False
        assert torch.equal(second[2], first[2])
        assert second[3] == 1


class Weights(nn.Module):
    """Two elements that start at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forge_reset(self, *_: Any, **__: Any) -> None:
        nn.init.ones_(self.w)


class Two(nn.Module):
    """The loss of a micro-batch is the sum of all elements times mean(x): every gradient is mean(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = Weights(), Weights()

    def forward(self, x: Tensor) -> Tensor:
        return (self.a.w.sum() + self.c.w.sum()) * x.mean()


class SumForward:
    """Each micro-batch counts one token."""

    def count(self, batch: dict[str, Tensor]) -> dict[str, int]:
        return {"tokens": 1, "sequences": 1}

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Output:
        loss = model(batch["x"])
        return Output(loss_sum=loss, token_loss=loss.detach())


def adamw(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1, fused=True)


def frozen_after_training(folder: str, layout: str) -> list[Any]:
    """Values and first moment of the frozen part after 5 updates and after 10 more of the rest."""
    plugin = case_plugin(
        Two,
        ListData([{"x": torch.ones(1)}]),
        SumForward(),
        adamw,
        forge_module_aliases=lambda: [Alias(name="first", patterns=("a.*",))],
    )
    stages = "--freeze.stages=[{start_step=6, modules=['first']}]"
    flags = [stages, "--train.max_steps=15", NO_CLIP, layout]
    seen: list[Any] = []
    with case_session(Path(folder), plugin, *flags) as session:

        def watch(s: Any, step: int, result: Any) -> None:
            if step in (5, 15):
                state = s.optimizers["main"].optimizer.state[s.model.a.w]
                seen.append([whole(s.model.a.w), whole(state["exp_avg"]), float(state["step"])])
                seen.append(whole(s.model.c.w))

        session.events["step_end"] = (watch,)
        run_training_loop(session)
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_frozen_parameter_that_is_sharded_does_not_move(
    pool2: WorkerPool, tmp_path: Path, layout: str
) -> None:
    """Parameter 1, gradient 1, AdamW at 0.1 with decay 0.1: five updates give 0.460891.

    1 -> 0.99 p - 0.1 each time: 0.99^5 - 0.1 (0.99^5 - 1) / (0.99 - 1) = 0.950990 - 0.490099.
    """
    for early, rest, late, moved in pool2.run(frozen_after_training, str(tmp_path), layout):
        torch.testing.assert_close(early[0], torch.full((2,), 0.460891), atol=1e-6, rtol=0)
        assert torch.equal(late[0], early[0])
        assert torch.equal(late[1], early[1])
        assert late[2] == early[2] == 5.0
        assert (moved < rest).all()


def rates(folder: str, accumulate: int) -> list[float]:
    """The rate found in the optimizer at each of 6 updates: up over 4, then down to 0 at 12."""

    def schedule(step: int) -> float:
        return min(step / 4, (12 - step) / 8)

    plugin = case_plugin(Two, ListData([{"x": torch.ones(1)}]), SumForward(), sgd(1.0), schedule)
    found: list[float] = []
    flags = ["--train.max_steps=6", f"--train.grad_accum_steps={accumulate}", NO_CLIP]
    with case_session(Path(folder), plugin, *flags) as session:

        def watch(s: Any, step: int, result: Any) -> None:
            found.append(s.optimizers["main"].optimizer.param_groups[0]["lr"])

        session.events["step_end"] = (watch,)
        run_training_loop(session)
    return found


def test_the_schedule_advances_once_an_update_on_any_number_of_ranks(
    pool2: WorkerPool, tmp_path: Path
) -> None:
    expected = [0.25, 0.5, 0.75, 1.0, 0.875, 0.75]
    assert rates(str(tmp_path / "1"), 1) == expected
    assert rates(str(tmp_path / "2"), 4) == expected
    assert pool2.run(rates, str(tmp_path / "3"), 4) == [expected, expected]


def measured(folder: str) -> list[Any]:
    """What rank 0 and rank 1 keep of a run of 3 updates."""
    plugin = case_plugin(Two, ListData([{"x": torch.ones(1)}]), SumForward(), sgd(1.0))
    with case_session(Path(folder), plugin, "--train.max_steps=3") as session:
        run_training_loop(session)
        jsonl = session.metrics.jsonl is not None
        session.check_stop()
    return [jsonl, str(session.run.path), list(read_records(session.run.metrics)), session.tokens_seen]


def test_one_rank_writes_for_all(pool2: WorkerPool, tmp_path: Path) -> None:
    first, second = pool2.run(measured, str(tmp_path))
    assert [first[0], second[0]] == [True, False]
    assert first[1] == second[1]
    assert first[3] == second[3] == 6  # one token a rank and update
    assert [record["step"] for record in first[2]] == [1, 2, 3]
    for record in first[2]:
        assert record["train/slowest_rank"] in (0.0, 1.0)
        assert record["train/tokens_per_sec"] > 0
        assert record["memory/peak_gb"] > 0
