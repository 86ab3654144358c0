"""What a run leaves behind does not show where it was interrupted: data, metrics, bad steps, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ckptkit import assert_same_run, killed, names, plugins_for, run
from test_saving import nan_forward

from forge_ckpt import open_checkpoint
from forge_core.contract.runtime import Observer
from forge_core.errors import GuardError

EPOCHS: dict[str, Any] = {
    "data": {"synthetic": {"n_samples": 24}, "holdout": 0.0},
    "train": {"batch_size": 2, "max_steps": 36},
    "eval": {"at_end": False},
    "scheduler": {"name": "constant"},
}
"""12 updates an epoch, three epochs."""


class Tokens(Observer):
    """The first token of every row that an update saw, as a mark of the sample."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []

    def train_begin(self, session: Any) -> None:
        take, self.mine = session.stream.take, []

        def recorded(count: int) -> Any:
            batches = take(count)
            self.mine.append([b["tokens"][:, :4].tolist() for b in batches])
            return batches

        session.stream.take = recorded

    def step_end(self, session: Any, step: int, result: Any) -> None:
        self.seen.append(self.mine[-1])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder, tokens = tmp_path_factory.mktemp("straight"), Tokens()
    run(folder, plugins=plugins_for(hooks={"observers": [tokens]}), checkpoint={"interval": 3}, **EPOCHS)
    return folder / "a", tokens.seen


@pytest.mark.parametrize("step", [9, 12])
@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_after_a_resume_are_whole(
    step: int, workers: int, straight: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """Saved at the end of an epoch, and three updates before: what follows is as without the stop."""
    tokens = Tokens()
    table = {"interval": 0, "resume": str(straight[0] / f"checkpoints/step_{step:08d}")}
    data = {**EPOCHS["data"], "num_workers": workers}
    run(
        tmp_path,
        plugins=plugins_for(hooks={"observers": [tokens]}),
        checkpoint=table,
        **{**EPOCHS, "data": data},
    )
    assert tokens.seen == straight[1][step:]
    rows = [json.dumps(row) for update in straight[1] for batch in update for row in batch]
    epochs = [rows[i : i + 24] for i in (0, 24, 48)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def test_loading_and_saving_again_changes_no_state(straight: tuple[Path, list[Any]], tmp_path: Path) -> None:
    place = straight[0] / "checkpoints/step_00000012"
    tables = {**EPOCHS, "train": {**EPOCHS["train"], "max_steps": 12}}
    run(tmp_path, checkpoint={"start_from": str(place)}, **tables)
    one, other = open_checkpoint(place), open_checkpoint(tmp_path / "a")
    states = [{k: v for k, v in c.state().items() if k != "surroundings"} for c in (one, other)]
    assert states[0] == states[1]
    for name in one.index.tensors:
        assert one.tensor(name).numpy().tobytes() == other.tensor(name).numpy().tobytes(), name
    random_states = [c.bytes("state_00000.safetensors") for c in (one, other)]
    assert random_states[0] == random_states[1]


def test_metrics_have_every_step_once(tmp_path: Path) -> None:
    """Died after 9, saved at 6, then on to 12: what was logged of 7 to 9 gives way to what happened."""
    tables: dict[str, Any] = {
        "train": {"max_steps": 12},
        "checkpoint": {"interval": 6},
        "eval": {"interval": 5},
    }
    whole = run(tmp_path / "s", **tables)
    killed(tmp_path / "k", 9, **tables)
    resumed = run(tmp_path / "k", **tables)
    for name in ("train/loss", "eval/loss"):
        one, other = (
            [(r["step"], r[name]) for r in result.records if name in r] for result in (whole, resumed)
        )
        assert one == other
    assert [r["step"] for r in resumed.records if "train/loss" in r] == list(range(1, 13))


def test_a_run_that_gave_up_left_a_checkpoint_from_before(tmp_path: Path) -> None:
    """Steps 3 and 4 are bad, two in a row are too many."""
    plugins = plugins_for(hooks={"forge_build_forward": nan_forward})
    with pytest.raises(GuardError, match="2 bad steps in a row") as caught:
        run(tmp_path, plugins=plugins, guard={"max_consecutive": 2})
    assert caught.value.exit_status == 3
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]
    assert open_checkpoint(tmp_path / "a/checkpoints/latest").state()["guard"]["streak"] == 0
    assert len(run(tmp_path).losses) == 4  # and can be gone on with


def test_the_schedule_goes_on_where_it_was_after_skipped_steps(tmp_path: Path) -> None:
    """Up over 4 updates and down to 0 at the twelfth; 3 and 4 are skipped and use up their rates."""
    tables = {
        "optimizer": {"lr": 1.0},
        "scheduler": {"name": "linear", "warmup_steps": 4, "min_lr_ratio": 0.0},
    }
    hooks = {"forge_build_forward": nan_forward}
    whole = run(tmp_path / "whole", plugins=plugins_for(hooks=hooks), steps=12, **tables)
    killed(tmp_path / "parts", 6, hooks=hooks, train={"max_steps": 12}, **tables)
    parts = run(tmp_path / "parts", plugins=plugins_for(hooks=hooks), steps=12, **tables)
    rates = [0.25, 0.5, 0.75, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0]
    assert whole.metric("train/lr") == parts.metric("train/lr") == rates
    assert whole.oks == [step not in (3, 4) for step in range(1, 13)]
    assert len(parts.oks) == 7
    assert_same_run(whole, parts)


SLOW_WRITER = """
import os, sys, time
import forge_ckpt.store as store
real = store.write_file
def slow(path, parts):
    if "weights" in path.name and "step_00000001" not in str(path):
        print("writing", flush=True)
        time.sleep(2)
    return real(path, parts)
store.write_file = slow
from forge_core.commands.main import run
run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_signals_while_saving(signals: int, tmp_path: Path) -> None:
    """The first lets the save finish and ends with 75; a second ends at once, and leaves nothing torn."""
    small = ["--model.dim=16", "--model.n_layers=1", "--model.n_heads=2", "--train.seq_len=8"]
    small += ["--train.batch_size=2", "--train.max_steps=50", "--data.source=synthetic", "--run.name=a"]
    small += ["--eval.sample_tokens=0", "--eval.at_end=false", "--checkpoint.interval=1", "--run.dir=."]
    small += ["--checkpoint.mode=sync", "--model.vocab_size=64", "--eval.interval=0"]
    command = [sys.executable, "-c", SLOW_WRITER, "train", "quickstart-saved", *small]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    ) as child:
        assert child.stdout is not None
        while "writing" not in child.stdout.readline():
            assert child.poll() is None
        began = time.monotonic()
        for number in range(signals):
            os.kill(child.pid, signal.SIGTERM)
            time.sleep(0.5 if number + 1 < signals else 0)
        child.stdout.read()
        status = child.wait(20)
    assert time.monotonic() - began < 10
    assert status == (75 if signals == 1 else 128 + signal.SIGTERM)
    saved = open_checkpoint(tmp_path / "a/checkpoints/latest")
    assert saved.verify() == []
    assert saved.manifest.step == (2 if signals == 1 else 1)
