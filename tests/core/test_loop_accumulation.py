"""An update equals that of one big batch, whatever the split, and what is logged is what was minimised."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from casekit import (
    Bias,
    ListData,
    LogitsForward,
    Rows,
    Scalar,
    ScalarForward,
    case_plugin,
    case_session,
    labelled,
    sgd,
    unit,
)

from forge_core import run_training_loop


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "case" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("batches", "accumulate"),
    [
        ([labelled([0, 0, 0]), labelled([1])], 2),
        ([labelled([0, 0, 0, 1])], 1),
        ([labelled([0, 0, 0, -100]), labelled([1, -100, -100, -100])], 2),
    ],
    ids=["3+1", "one batch", "padded"],
)
def test_unequal_token_counts(tmp_path: Path, batches: list[Any], accumulate: int) -> None:
    """Three tokens of label 0 and one of label 1 move b by (+0.25, -0.25); a mean of means would not move
    it."""
    plugin = case_plugin(Bias, ListData(batches), LogitsForward(), sgd(1.0))
    flags = ("--train.max_steps=1", f"--train.grad_accum_steps={accumulate}", "--train.grad_clip_norm=0")
    with case_session(tmp_path, plugin, *flags) as session:
        run_training_loop(session)
        b = session.model.b.detach()
    torch.testing.assert_close(b, torch.tensor([0.25, -0.25]), atol=1e-6, rtol=0)


def test_logged_loss_is_the_token_mean_of_the_update(tmp_path: Path) -> None:
    """One token at ln 4 and three at ln 2 give 0.866434, not a mean of means nor the last micro-batch."""
    data = ListData([labelled([0], [1]), labelled([0, 1, 0], [0, 0, 0])])
    plugin = case_plugin(Rows, data, LogitsForward(), sgd(0.0))
    with case_session(tmp_path, plugin, "--train.max_steps=1", "--train.grad_accum_steps=2") as session:
        run_training_loop(session)
    assert records(tmp_path)[0]["train/loss"] == pytest.approx(0.866434, abs=1e-6)
    assert records(tmp_path)[0]["train/objective"] == pytest.approx(0.866434, abs=1e-6)


def test_micro_batch_without_target_weighs_nothing(tmp_path: Path) -> None:
    data = ListData([labelled([0, 0]), labelled([-100, -100])])
    plugin = case_plugin(Bias, data, LogitsForward(), sgd(1.0))
    flags = ("--train.max_steps=1", "--train.grad_accum_steps=2", "--train.grad_clip_norm=0")
    with case_session(tmp_path, plugin, *flags) as session:
        run_training_loop(session)
        b = session.model.b.detach()
    torch.testing.assert_close(b, torch.tensor([0.5, -0.5]), atol=1e-6, rtol=0)
    assert records(tmp_path)[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_step_without_target_changes_nothing(tmp_path: Path) -> None:
    """Weights and moments keep their bits, the step counts as skipped, the loss is 0, nothing is raised."""
    data = ListData([labelled([0, 0]), labelled([-100, -100]), labelled([-100, -100])])
    plugin = case_plugin(Bias, data, LogitsForward(), lambda p: torch.optim.AdamW(p, lr=0.1, fused=True))
    with case_session(tmp_path, plugin, "--train.max_steps=3") as session:
        seen: list[Any] = []

        class Watch:
            def __call__(self, s: Any, step: int, result: Any) -> None:
                state = s.optimizers["main"].optimizer.state[s.model.b]
                seen.append((s.model.b.detach().clone(), state["exp_avg"].clone(), state["step"].clone()))

        session.events["step_end"] = (Watch(),)
        run_training_loop(session)
        assert session.guard.skipped == 2
        assert session.guard.streak == 0
    for later in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], later, strict=True))
    assert [r["train/loss"] for r in records(tmp_path)[1:]] == [0.0, 0.0]


def test_window_crosses_the_end_of_the_data(tmp_path: Path) -> None:
    """Five micro-batches, accumulation 2: two epochs are exactly five updates, and w falls by 0.1 in each."""
    plugin = case_plugin(Scalar, ListData([unit(1.0)] * 5), ScalarForward(), sgd(0.1))
    with case_session(tmp_path, plugin, "--train.max_steps=5", "--train.grad_accum_steps=2") as session:
        step, _ = run_training_loop(session)
        assert session.data.position == 10
        assert session.model.w.item() == pytest.approx(0.5, abs=1e-6)
    assert step == 5


def test_clipping_acts_once_on_the_whole_update(tmp_path: Path) -> None:
    """+6 and -5 average to 0.5 and need no clipping; +6 and +6 are reported as 6 and move w by exactly 1."""

    class FromZero(Scalar):
        start = 0.0

    data = ListData([unit(6.0), unit(-5.0), unit(6.0), unit(6.0)])
    plugin = case_plugin(FromZero, data, ScalarForward(), sgd(1.0))
    flags = ("--train.max_steps=2", "--train.grad_accum_steps=2", "--train.grad_clip_norm=1.0")
    with case_session(tmp_path, plugin, *flags) as session:
        run_training_loop(session)
        assert session.model.w.item() == pytest.approx(-1.5, abs=1e-5)
    norms = [record["train/grad_norm"] for record in records(tmp_path)]
    assert norms == pytest.approx([0.5, 6.0], abs=1e-6)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_schedule_moves_once_an_update(tmp_path: Path, accumulate: int) -> None:
    """Warm-up over 4 updates and linear decay to 0 at update 12, also across a skipped update."""

    def schedule(step: int) -> float:
        return step / 4 if step <= 4 else (12 - step) / 8

    bad = [unit(1.0)] * accumulate * 2 + [unit(float("nan"))] * accumulate + [unit(1.0)] * accumulate * 9
    plugin = case_plugin(Scalar, ListData(bad), ScalarForward(), sgd(1.0), schedule)
    flags = ("--train.max_steps=12", f"--train.grad_accum_steps={accumulate}")
    with case_session(tmp_path, plugin, *flags) as session:
        session.log.disabled = True
        run_training_loop(session)
        assert session.guard.skipped == 1
    rates = [record["train/lr"] for record in records(tmp_path)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0])
