"""Real runs of a tiny model on two processes that a launcher starts: how they end, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launchkit import STARTED, clean_environment, end_all, gone, within
from pluginkit import package
from slurmkit import FakeSlurm

pytestmark = [pytest.mark.slow, pytest.mark.alone]

FAULT = """
    import os
    import forge_core
    from forge_core.contract import Observer

    forge_api = 1

    @forge_core.config.table
    class Fault:
        '''What goes wrong on rank 1.'''
        what: str = forge_core.config.key("boom", help="The message of its error.")

    if os.environ.get("FAULT") == "start" and os.environ.get("RANK") == "1":
        os._exit(9)

    class Breaks(Observer):
        def gradients_ready(self, session, step):
            if session.ranks.rank == 1 and step == 2:
                raise ValueError(session.config[Fault].what)

    @forge_core.hookimpl
    def forge_tables():
        return Fault

    @forge_core.hookimpl
    def forge_observers():
        return [Breaks()]
"""
TINY = """
[run]
name = "x"
[model]
dim = 16
n_layers = 1
n_heads = 2
ffn_hidden_dim = 32
vocab_size = 64
[data]
source = "synthetic"
[train]
seq_len = 8
batch_size = 2
max_steps = 3
device = "cpu"
[eval]
at_end = false
sample_tokens = 0
[metrics]
log_interval = 1
progress = "plain"
"""
ENDLESS = "--train.max_steps=1000000"
LAUNCHED = ["-m", "forge_core", "train", "tiny.toml", "--nproc", "2"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    end_all()


def start(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**clean_environment(), **variables}
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=folder, env=environment, stdout=out, stderr=err, text=True
        )
    STARTED.append(process)
    return process


def training(folder: Path, process: subprocess.Popen[str]) -> list[int]:
    """The processes of the ranks, by rank, once the first step is done."""
    assert within(100, lambda: "step" in (folder / "out").read_text() or process.poll() is not None)
    assert process.poll() is None, (folder / "err").read_text()
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = dict(v.partition(b"=")[::2] for v in path.read_bytes().split(b"\0"))
            parent = int(path.with_name("stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == process.pid and b"RANK" in variables:
            found[int(variables[b"RANK"])] = int(path.parent.name)
    return [found[0], found[1]]


def left(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "runs" / "x" / "exit.json").read_text())
    return told


def errors(folder: Path) -> list[str]:
    return (folder / "err").read_text().splitlines()


def test_two_processes_make_one_run(folder: Path) -> None:
    (folder / "tiny.toml").write_text(TINY.replace('name = "x"', ""))
    assert start(folder, *LAUNCHED).wait(timeout=90) == 0
    (run,) = (folder / "runs").iterdir()
    assert json.loads((run / "exit.json").read_text())["status"] == 0
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [
        1,
        2,
        3,
    ]
    out = (folder / "out").read_text()
    assert [out.count(f"step {step}/3") for step in (1, 2, 3)] == [1, 1, 1]
    assert "[rank 1]" not in out
    assert errors(folder) == []


@pytest.mark.parametrize("to", ["launcher", "rank 1"])
def test_a_signal_ends_all_ranks_after_the_same_step(folder: Path, to: str) -> None:
    process = start(folder, *LAUNCHED, ENDLESS)
    ranks = training(folder, process)
    os.kill(process.pid if to == "launcher" else ranks[1], signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    told = left(folder)
    assert told["status"] == 128 + signal.SIGTERM
    assert "nothing saved" in told["reason"]
    records = (folder / "runs" / "x" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["step"] == told["step"]
    assert not any(line.startswith("error") for line in errors(folder))
    assert gone(ranks)


def test_an_error_on_one_rank_ends_all_and_is_named(folder: Path) -> None:
    plugin = package(folder, "fault", FAULT)
    flags = [ENDLESS, "--fault=true", "--distributed.timeout=120"]
    process = start(folder, *LAUNCHED, *flags, PYTHONPATH=str(plugin.folder))
    assert within(60, lambda: "step" in (folder / "out").read_text())
    began = time.monotonic()
    assert process.wait(timeout=60) == 1
    assert time.monotonic() - began < 30
    shown = [line for line in errors(folder) if "boom" in line]
    assert shown == ["error: rank 1: ValueError: boom"]
    assert "plugin fault" in errors(folder)[errors(folder).index(shown[0]) + 1]
    told = left(folder)
    assert (told["status"], told["rank"]) == (1, 1)
    assert "boom" in told["reason"]


def test_a_rank_that_dies_at_start(folder: Path) -> None:
    plugin = package(folder, "fault", FAULT)
    began = time.monotonic()
    process = start(folder, *LAUNCHED, "--fault=true", PYTHONPATH=str(plugin.folder), FAULT="start")
    assert process.wait(timeout=60) == 9
    assert time.monotonic() - began < 20
    assert [line for line in errors(folder) if line.startswith("error")] == [
        "error: rank 1: ended with status 9"
    ]


def test_data_that_cannot_be_used_is_told_once(folder: Path) -> None:
    (folder / "tokens").mkdir()
    np.save(folder / "tokens" / "a.npy", np.arange(4000, dtype=np.uint16) % 64)
    content = (folder / "tokens" / "a.npy").read_bytes()
    (folder / "tokens" / "b.npy").write_bytes(content[:4000])
    began = time.monotonic()
    process = start(folder, *LAUNCHED, "--data.source=tokens", "--data.path=tokens")
    assert process.wait(timeout=60) == 2
    assert time.monotonic() - began < 20
    told, *rest = errors(folder)
    assert told.startswith("error: ")
    assert "b.npy is cut short: its header promises 4000 tokens of uint16" in told
    assert rest == ["  hint: copy it again", "  on every rank"]
    assert not (folder / "runs").exists()


def test_a_rank_killed_in_the_middle(folder: Path) -> None:
    process = start(folder, *LAUNCHED, ENDLESS)
    ranks = training(folder, process)
    began = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    assert process.wait(timeout=60) == 128 + signal.SIGKILL
    assert time.monotonic() - began < 20
    assert "error: rank 1: killed by SIGKILL" in errors(folder)
    assert (left(folder)["status"], left(folder)["rank"]) == (137, 1)
    assert left(folder)["step"] >= 1  # of the last line of its metrics
    assert gone(ranks)


def test_torchrun_and_its_one_status(folder: Path) -> None:
    """The guard gives up (3): torchrun ends with 1, exit.json and its own summary tell the truth."""
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    words = [*words, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "forge_core", "train"]
    flags = ["tiny.toml", ENDLESS, "--optimizer.lr=1e38", "--guard.action=stop"]
    assert start(folder, *words, *flags).wait(timeout=90) == 1
    assert left(folder)["status"] == 3
    assert "exitcode  : 3" in "\n".join(errors(folder))


def test_the_guard_gives_up(folder: Path) -> None:
    flags = [ENDLESS, "--optimizer.lr=1e38", "--guard.action=stop"]
    assert start(folder, *LAUNCHED, *flags).wait(timeout=90) == 3
    assert len([line for line in errors(folder) if line.startswith("error")]) == 1
    assert left(folder)["status"] == 3


def test_a_job_of_slurm_is_told_to_end(folder: Path) -> None:
    slurm = FakeSlurm(folder, clean_environment())
    command = ["launch", "slurm", "tiny.toml", "--submit", ENDLESS, "--launch.tasks_per_node=2"]
    process = start(folder, "-m", "forge_core", *command, **slurm.variables)
    assert within(60, lambda: (folder / "log.out").exists() and "step" in slurm.output)
    os.kill(int(slurm.srun.read_text()), signal.SIGUSR1)
    assert process.wait(timeout=60) == 0
    assert slurm.log[-1] == f"job ended with {128 + signal.SIGUSR1}"
    assert left(folder)["status"] == 128 + signal.SIGUSR1
    assert [path.name for path in (folder / "runs").iterdir()] == ["x"]


@pytest.mark.parametrize(("network", "status", "tag"), [("lo", 0, "OK"), ("absent", 1, "MISS")])
def test_the_doctor_lets_processes_meet(folder: Path, network: str, status: int, tag: str) -> None:
    process = start(folder, "-m", "forge_core", "doctor", "--nproc", "2", GLOO_SOCKET_IFNAME=network)
    assert process.wait(timeout=90) == status
    (line,) = [line for line in (folder / "out").read_text().splitlines() if " meeting " in line]
    assert line.startswith(tag)
    assert [line for line in errors(folder) if "on every rank" in line] == ["  on every rank"] * status
