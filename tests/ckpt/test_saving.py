"""When checkpoints are made, what is in them, and what stays."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from ckptkit import KilledError, killed, names, plugins_for, run

from forge_ckpt import open_checkpoint
from forge_core.contract.runtime import Observer


class Durable(Observer):
    """Notes what observers are told of checkpoints, and whether it was true."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []
        self.begun = 0

    def checkpoint_durable(self, session: Any, step: int, path: Path, kind: str) -> None:
        assert (path / "manifest.json").exists()
        assert path.name == f"step_{step:08d}"
        self.seen.append((step, kind))


def steps(folder: Path) -> list[int]:
    return [int(name[5:]) for name in names(folder) if name.startswith("step_")]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_clean_end_is_saved_once_and_saves_off_the_interval_too(mode: str, tmp_path: Path) -> None:
    durable = Durable()
    table = {"interval": 3, "mode": mode}
    run(tmp_path, plugins=plugins_for(hooks={"observers": [durable]}), steps=7, checkpoint=table)
    assert steps(tmp_path) == [3, 6, 7]
    assert durable.seen == [(3, "scheduled"), (6, "scheduled"), (7, "final")]
    assert (tmp_path / "a/checkpoints/latest").readlink() == Path("step_00000007")


def test_a_scheduled_save_of_the_last_step_is_the_final_one(tmp_path: Path) -> None:
    durable = Durable()
    run(tmp_path, plugins=plugins_for(hooks={"observers": [durable]}), steps=6, checkpoint={"interval": 3})
    assert durable.seen == [(3, "scheduled"), (6, "final")]


@pytest.mark.parametrize("target", [7, 5])
def test_a_finished_run_does_nothing_more(target: int, tmp_path: Path) -> None:
    run(tmp_path, steps=7, checkpoint={"interval": 3})
    last = tmp_path / "a/checkpoints/step_00000007"
    before = {p.name: p.read_bytes() for p in last.iterdir() if p.is_file()}
    again = run(tmp_path, steps=target, checkpoint={"interval": 3})
    assert again.status == 0
    assert again.losses == []
    assert {p.name: p.read_bytes() for p in last.iterdir() if p.is_file()} == before
    assert steps(tmp_path) == [3, 6, 7]


def test_initial_save(tmp_path: Path) -> None:
    durable = Durable()
    table = {"interval": 5, "initial": True}
    run(tmp_path, plugins=plugins_for(hooks={"observers": [durable]}), steps=2, checkpoint=table)
    assert durable.seen == [(0, "initial"), (2, "final")]
    assert steps(tmp_path) == [0, 2]


@pytest.mark.parametrize(
    ("window", "interval", "expected"),
    [
        # inside: first + 0, 1, 2, 4, 8, ...; the interval counts only outside of it
        ([0, 8], 5, [0, 1, 2, 4, 8, 10, 12]),
        ([3, 9], 6, [3, 4, 5, 7, 12]),
    ],
)
def test_window(window: list[int], interval: int, expected: list[int], tmp_path: Path) -> None:
    table = {"window": window, "interval": interval, "keep_last": 2}
    run(tmp_path, steps=12, checkpoint=table)
    assert steps(tmp_path) == expected  # all of the window are kept, and the last two


def test_minutes(tmp_path: Path) -> None:
    run(tmp_path, steps=3, checkpoint={"interval": 0, "minutes": 1e-9})
    assert steps(tmp_path) == [1, 2, 3]


class Signal(Observer):
    def gradients_ready(self, session: Any, step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_saves_the_finished_update_and_asks_for_more(tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", steps=6)
    durable = Durable()
    hooks = {"observers": [Signal(), durable]}
    table = {"interval": 100}
    stopped = run(tmp_path / "b", plugins=plugins_for(hooks=hooks), steps=6, checkpoint=table)
    assert stopped.status == 75
    assert durable.seen == [(3, "emergency")]
    saved = open_checkpoint(tmp_path / "straight/a/checkpoints/step_00000003")
    assert torch.equal(saved.tensor("model/embed.weight"), stopped.weights["embed.weight"])
    resumed = run(tmp_path / "b", steps=6, checkpoint=table)
    assert resumed.losses == straight.losses[3:]


def test_files_are_plain_safetensors_and_json(tmp_path: Path) -> None:
    result = run(tmp_path, steps=2)
    folder = tmp_path / "a/checkpoints/step_00000002"
    weights = safetensors.torch.load_file(folder / "weights_00000.safetensors")
    assert {f"model/{name}" for name in result.weights} == set(weights)
    for name, value in result.weights.items():
        assert torch.equal(weights[f"model/{name}"], value)
    files = {p.name for p in folder.iterdir()}
    assert files == {
        "config.toml",
        "index.json",
        "manifest.json",
        "optimizer_00000.safetensors",
        "state.json",
        "state_00000.json",
        "state_00000.safetensors",
        "weights_00000.safetensors",
    }
    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == 2
    assert state["surroundings"]["torch"] == torch.__version__
    assert (folder / "config.toml").read_text() == (tmp_path / "a/config.toml").read_text()


def test_retention_counts_saves_and_not_names(tmp_path: Path) -> None:
    folder = tmp_path / "a/checkpoints"
    run(tmp_path, steps=4, checkpoint={"interval": 2})
    (folder / "step_00000002").rename(folder / "step_00005000")  # of an older run
    (folder / "step_00000006").mkdir()  # torn
    (folder / "notes.txt").write_text("mine")
    (folder / "step_backup").mkdir()
    run(tmp_path, steps=12, checkpoint={"interval": 4, "keep_last": 1, "resume": False})
    assert names(tmp_path) == ["latest", "notes.txt", "step_00000006", "step_00000012", "step_backup"]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": 0}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 1, "keep_every": 2}, [2, 4, 6]),
    ],
)
def test_rules_of_retention_add_up(rules: dict[str, int], expected: list[int], tmp_path: Path) -> None:
    run(tmp_path, steps=6, checkpoint=rules)
    assert steps(tmp_path) == expected


def test_best_by_a_metric(tmp_path: Path) -> None:
    result = run(
        tmp_path, steps=6, checkpoint={"keep_last": 1, "keep_best": 2, "interval": 1}, eval={"interval": 1}
    )
    losses = {r["step"]: r["eval/loss"] for r in result.records if "eval/loss" in r}
    best = sorted(losses, key=lambda s: losses[s])[:2]
    assert steps(tmp_path) == sorted({6, *best})


def test_the_last_one_is_ranked_by_the_evaluation_at_the_end(tmp_path: Path) -> None:
    """The interval asks for a save of that step, too; without its metrics it would go."""
    tables: dict[str, Any] = {"checkpoint": {"keep_last": 1, "keep_best": 1, "interval": 2}}
    tables["eval"] = {"steps": 1, "at_end": True}
    first = run(tmp_path, steps=4, optimizer={"lr": 1e-3}, **tables)
    (loss,) = [record["eval/loss"] for record in first.records if "eval/loss" in record]
    assert open_checkpoint(tmp_path / "a").manifest.metrics["eval/loss"] == loss
    again = run(tmp_path, steps=8, optimizer={"lr": 10.0}, **tables)
    worse = [record["eval/loss"] for record in again.records if "eval/loss" in record][-1]
    assert worse > loss
    assert steps(tmp_path) == [4, 8]


def test_a_metric_that_no_evaluation_gives_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = {"keep_last": 1, "keep_best": 1, "best_metric": "eval/los", "interval": 1}
    run(tmp_path, steps=3, checkpoint=best, eval={"interval": 1})
    told = [line for line in capsys.readouterr().err.splitlines() if "keep_best" in line]
    assert len(told) == 1
    assert "evaluations give no eval/los, but eval/loss" in told[0]
    assert steps(tmp_path) == [3]


def test_names_sort_as_numbers(tmp_path: Path) -> None:
    run(tmp_path, steps=11, checkpoint={"keep_last": 2, "interval": 1})
    assert steps(tmp_path) == [10, 11]


def test_a_save_waits_for_the_end_of_a_bad_streak(tmp_path: Path) -> None:
    """Bad steps 3 and 4 save nothing: what is on disk is from before, and resuming there is safe."""

    spoil = plugins_for(hooks={"forge_build_forward": nan_forward})
    run(tmp_path, plugins=spoil, steps=6)
    assert steps(tmp_path) == [1, 2, 5, 6]


def nan_forward(session: Any, model: Any) -> Any:
    from forge_core.model.forward import TextForward

    inner = TextForward(session)

    class Forward:
        def count(self, batch: Any) -> dict[str, int]:
            return inner.count(batch)

        def __call__(self, model: Any, batch: Any) -> Any:
            output = inner(model, batch)
            if session.step + 1 in (3, 4):
                output.loss_sum = output.loss_sum * float("nan")
            return output

    return Forward()


def test_training_error_is_not_masked_by_a_pending_save(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        run(tmp_path, kill=3, plugins=plugins_for(kill=3), checkpoint={"mode": "async"})
    assert steps(tmp_path) == [1, 2]
    killed(tmp_path, 5, checkpoint={"mode": "async"})
    assert steps(tmp_path) == [1, 2, 3, 4]
