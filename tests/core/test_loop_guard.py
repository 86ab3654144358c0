"""Bad steps: skipped without a trace, counted, written down, and the end of the run when there are too
many."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from casekit import ListData, Scalar, ScalarForward, case_plugin, case_session, sgd, unit
from torch import Tensor

from forge_core import run_training_loop
from forge_core.config.tables import GuardConfig
from forge_core.errors import ConfigError, GuardError
from forge_core.loop import incidents
from forge_core.loop.guard import Guard

NAN, INF = float("nan"), float("inf")


def run(tmp_path: Path, xs: list[float], *flags: str, accumulate: int = 1, optimizer: Any = None) -> Any:
    data = ListData([unit(x) for x in xs])
    plugin = case_plugin(Scalar, data, ScalarForward(), optimizer or sgd(0.1))
    steps = len(xs) // accumulate
    all_flags = (f"--train.max_steps={steps}", f"--train.grad_accum_steps={accumulate}", *flags)
    with case_session(tmp_path, plugin, *all_flags) as session:
        session.log.disabled = True
        run_training_loop(session)
        return session


def test_bad_micro_batch_discards_its_window_only(tmp_path: Path) -> None:
    session = run(tmp_path, [1, 1, NAN, 1, 1, 1], accumulate=2)
    assert session.model.w.item() == pytest.approx(0.8, abs=1e-6)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("fused", [True, False])
def test_parameters_and_moments_keep_their_bits(tmp_path: Path, bad: float, fused: bool) -> None:
    def adamw(parameters: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, fused=fused)

    short = run(tmp_path / "short", [1.0, 2.0], optimizer=adamw)
    long = run(tmp_path / "long", [1.0, 2.0, bad, bad], optimizer=adamw)
    assert torch.equal(short.model.w, long.model.w)
    before = short.optimizers["main"].optimizer.state[short.model.w]
    after = long.optimizers["main"].optimizer.state[long.model.w]
    assert all(torch.equal(before[key], after[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_infinite_gradient_under_a_finite_loss(tmp_path: Path) -> None:
    """The square root has an infinite slope at 0 while its value is fine."""

    class Root(ScalarForward):
        def __call__(self, model: Any, batch: dict[str, Tensor]) -> Any:
            output = super().__call__(model, batch)
            output.loss_sum = output.loss_sum + torch.sqrt(model.w * 0)
            return output

    plugin = case_plugin(Scalar, ListData([unit(1.0)]), Root(), sgd(0.1))
    with case_session(tmp_path, plugin, "--train.max_steps=1") as session:
        session.log.disabled = True
        run_training_loop(session)
        assert session.model.w.item() == 1.0
        assert session.guard.skipped == 1


def test_streak_resets_on_a_good_step(tmp_path: Path) -> None:
    session = run(tmp_path, [NAN, NAN, 1, NAN, NAN, 1], "--guard.max_consecutive=3")
    assert session.step == 6
    assert session.guard.skipped == 4


def test_limit_ends_the_run_and_says_the_count(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="3 bad steps in a row, the last at step 4") as caught:
        run(tmp_path, [1, NAN, NAN, NAN, 1], "--guard.max_consecutive=3")
    assert caught.value.exit_status == 3
    assert "lower optimizer.lr" in caught.value.hint
    with pytest.raises(GuardError, match="the last at step 3") as caught:
        run(tmp_path / "never", [NAN, NAN, NAN, 1], "--guard.max_consecutive=3")
    assert "no step was good: look at the weights that it starts from" in caught.value.hint


def test_action_stop_ends_at_the_first(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="step 2 is bad"):
        run(tmp_path, [1, NAN, 1], "--guard.action=stop")


def test_first_bad_step_writes_batch_and_summary(tmp_path: Path) -> None:
    run(tmp_path, [1, 2, NAN, INF])
    folders = sorted(path.name for path in (tmp_path / "case" / "incidents").iterdir())
    assert folders == ["step_00000003"]
    folder = tmp_path / "case" / "incidents" / "step_00000003"
    with np.load(folder / "batch.npz") as batch:
        assert np.isnan(batch["0.x"]).all()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["step"] == 3
    assert summary["loss"] == "nan"
    assert summary["parameters"]["w"]["non_finite"] == 0


@pytest.mark.parametrize("name", ["batch.npz", "summary.json"])
def test_a_full_disk_does_not_decide_what_becomes_of_a_bad_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nothing half-written is left, the next step is made, and the guard's limit is still the guard's."""
    whole = incidents.replace_file

    def full(path: Path, content: Any) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(path, content)

    monkeypatch.setattr(incidents, "replace_file", full)
    assert run(tmp_path / "skip", [1, NAN, 1]).model.w.item() == pytest.approx(0.8, abs=1e-6)
    left = [path.name for path in (tmp_path / "skip").rglob("incidents/*/*")]
    assert left == ([] if name == "batch.npz" else ["batch.npz"])
    with pytest.raises(GuardError, match="step 2 is bad"):
        run(tmp_path / "stop", [1, NAN, 1], "--guard.action=stop")


class Keeper:
    """A checkpointer in memory."""

    def __init__(self) -> None:
        self.saved: dict[int, float] = {}
        self.calls: list[Any] = []

    def load(self, session: Any) -> int:
        return 0

    def due(self, step: int) -> bool:
        return step > 0

    def save(self, session: Any, step: int, kind: str) -> None:
        self.saved[step] = session.model.w.item()
        self.calls.append((step, kind))

    def staged(self) -> None:
        pass

    def rollback(self, session: Any) -> int:
        with torch.no_grad():
            session.model.w.fill_(self.saved[1])
        return 1

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_rollback_restores_weights_and_goes_on_with_later_data(tmp_path: Path) -> None:
    keeper = Keeper()
    data = ListData([unit(x) for x in (1.0, 2.0, NAN, 3.0)])
    plugin = case_plugin(Scalar, data, ScalarForward(), sgd(0.1), forge_build_checkpointer=lambda: keeper)
    with case_session(
        tmp_path, plugin, "--train.max_steps=4", "--guard.action=rollback", "--train.grad_clip_norm=0"
    ) as s:
        s.log.disabled = True
        run_training_loop(s)
        # after step 1: 0.9; step 2 is undone by the rollback; step 4 sees x = 3, not the data of step 2 again
        assert s.model.w.item() == pytest.approx(0.9 - 0.3, abs=1e-6)
        assert data.position == 4


def test_saves_once_a_step_and_at_the_end(tmp_path: Path) -> None:
    keeper = Keeper()
    keeper.due = lambda step: step > 0 and step % 3 == 0  # type: ignore[method-assign]
    plugin = case_plugin(
        Scalar, ListData([unit(1.0)]), ScalarForward(), sgd(0.1), forge_build_checkpointer=lambda: keeper
    )
    with case_session(tmp_path, plugin, "--train.max_steps=7") as session:
        run_training_loop(session)
    assert keeper.calls == [(3, "scheduled"), (6, "scheduled"), (7, "final")]


def test_spike_rule_skips_what_stands_out(tmp_path: Path) -> None:
    xs = [1.0, 1.1, 0.9, 1.0, 1.05, 50.0, 1.0]
    flags = ("--guard.spike_sigma=4", "--guard.spike_window=8", "--train.grad_clip_norm=0")
    with_rule = run(tmp_path / "on", xs, *flags)
    without = run(tmp_path / "off", xs, "--train.grad_clip_norm=0")
    assert with_rule.guard.skipped == 1
    assert with_rule.model.w.item() == pytest.approx(1 - 0.1 * (sum(xs) - 50), abs=1e-5)
    assert without.guard.skipped == 0


def test_guard_state_round_trip() -> None:
    config = GuardConfig(spike_sigma=3.0, spike_window=8)
    first, second = Guard(config, torch.device("cpu")), Guard(config, torch.device("cpu"))
    for step, value in enumerate([1.0, 1.2, 0.8, 1.1]):
        loss = torch.tensor(value)
        first.observe(step, first.judge(loss, loss), loss, loss)
    list(first.learn(wait=True))
    second.load_state_dict(first.state_dict())
    for value in (1.0, 9.0):
        x = torch.tensor(value)
        assert bool(first.judge(x, x)) == bool(second.judge(x, x))


def test_rollback_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rollback needs checkpoints"):
        run(tmp_path, [1], "--guard.action=rollback")
