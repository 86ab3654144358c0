"""Signals end a run after the running step, in evaluation too; a second one ends it at once."""

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
import torch
from casekit import ListData, Scalar, ScalarForward, case_plugin, case_session, sgd, unit

from forge_core import run_training_loop
from forge_core.loop.run import REQUEUE, _outcome
from forge_core.loop.signals import CAUGHT, StopSignal

TINY = (
    "--model.dim=16",
    "--model.n_layers=1",
    "--model.n_heads=2",
    "--model.ffn_hidden_dim=32",
    "--model.vocab_size=64",
    "--data.source=synthetic",
    "--train.seq_len=8",
    "--train.batch_size=2",
    "--eval.at_end=false",
    "--eval.sample_tokens=0",
    "--metrics.progress=plain",
    "--train.max_steps=1000000",
)


def start(tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    """A run in its own process, once its first step is done."""
    command = [
        sys.executable,
        "-m",
        "forge_core",
        "train",
        f"--run.dir={tmp_path}",
        "--run.name=x",
        *TINY,
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step"):
            return process
    raise AssertionError("the run ended before its first step")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_ends_the_run_and_the_status_says_so(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    told = json.loads((tmp_path / "x" / "exit.json").read_text())
    assert told["status"] == 128 + number
    assert number.name in told["reason"]
    assert "nothing saved" in output
    assert told["step"] >= 1


def test_deadline_ends_a_process_that_hangs() -> None:
    script = (
        "import os, signal, time\n"
        "from forge_core.loop.signals import StopSignal\n"
        "with StopSignal(deadline=0.5) as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    while True: time.sleep(0.1)\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], timeout=30)
    assert done.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - began < 20


def test_second_signal_ends_at_once() -> None:
    script = (
        "import os, signal, time\n"
        "from forge_core.loop.signals import StopSignal\n"
        "with StopSignal() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert stop\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=30)
    assert done.returncode == 128 + signal.SIGUSR1


def test_handlers_are_back_afterwards() -> None:
    before = [signal.getsignal(number) for number in CAUGHT]
    with StopSignal() as stop:
        assert signal.getsignal(signal.SIGTERM) == stop._handle
    assert [signal.getsignal(number) for number in CAUGHT] == before


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_signal_inside_a_step_lets_it_finish(tmp_path: Path, where: str) -> None:
    """The state after a signal in the middle of a step is that of the finished step, bit for bit."""

    def interrupt(*_: Any) -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    class Interrupted(ScalarForward):
        def __init__(self, at: int | None) -> None:
            self.calls, self.at = 0, at

        def __call__(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
            self.calls += 1
            output = super().__call__(model, batch)
            if self.calls == self.at and where == "forward":
                interrupt()
            elif self.calls == self.at:
                output.loss_sum.register_hook(interrupt)
            return output

    values = []
    for name, steps, at in (("straight", 3, None), ("signalled", 9, 3)):
        plugin = case_plugin(Scalar, ListData([unit(x) for x in (1.0, 2.0, 3.0)]), Interrupted(at), sgd(0.1))
        with case_session(tmp_path / name, plugin, f"--train.max_steps={steps}") as session, session.stop:
            step, _ = run_training_loop(session)
            assert step == 3
            values.append(session.model.w.detach())
    assert torch.equal(*values)


def test_saved_and_requeued_where_there_is_a_checkpointer(tmp_path: Path) -> None:
    class Keeper:
        kinds: list[tuple[int, str]] = []  # noqa: RUF012

        def load(self, session: Any) -> int:
            return 0

        def due(self, step: int) -> bool:
            return False

        def save(self, session: Any, step: int, kind: str) -> None:
            self.kinds.append((step, kind))

        def staged(self) -> None: ...

        def drain(self) -> None: ...

        def close(self) -> None: ...

    keeper = Keeper()
    plugin = case_plugin(
        Scalar, ListData([unit(1.0)]), ScalarForward(), sgd(0.1), forge_build_checkpointer=lambda: keeper
    )
    with case_session(tmp_path, plugin, "--train.max_steps=9") as session, session.stop:
        session.events["step_end"] = (
            lambda s, step, result: os.kill(os.getpid(), signal.SIGTERM) if step == 2 else None,
        )
        run_training_loop(session)
        assert keeper.kinds == [(2, "emergency")]
        assert _outcome(session)[0] == REQUEUE


def test_long_evaluation_heeds_a_signal(tmp_path: Path) -> None:
    seen: list[int] = []

    class Slow:
        name = "slow"

        def __iter__(self) -> Any:
            for i in range(100):
                seen.append(i)
                if i == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield unit(1.0)

    data = ListData([unit(1.0)], [Slow()])
    plugin = case_plugin(Scalar, data, ScalarForward(), sgd(0.1))
    with case_session(tmp_path, plugin, "--train.max_steps=9", "--eval.interval=1") as session, session.stop:
        step, _ = run_training_loop(session)
    assert step == 1
    assert len(seen) <= 5
