"""Jobs of Slurm: the script, run by bash with small programs in place of sbatch, srun and scontrol."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w
from configkit import load
from launchkit import clean_environment, within
from slurmkit import FakeSlurm

from forge_core.commands.launch import make_script
from forge_core.config.tables import LaunchConfig
from forge_core.config.tables.launch import seconds
from forge_core.errors import ConfigError, UsageError
from forge_core.launch.environment import adopt_slurm, first_node, restarts
from forge_core.launch.slurm import batch_script

TASK = """
import os, signal, sys, time
from forge_core.launch.environment import adopt_slurm
from forge_core.launch.status import keep, settle
adopt_slurm()
rank = int(os.environ.get("RANK", "0"))
here = os.path.dirname(__file__)
def say(text):
    open(f"{here}/said", "a").write(f"{rank} {text}\\n")
def save(seconds):
    stopped = []
    signal.signal(signal.SIGUSR1, lambda number, frame: stopped.append(number))
    say("ready")
    while not stopped: time.sleep(0.02)
    time.sleep(seconds)
    say("saved")
    sys.exit(settle(75, main=rank == 0))
"""


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path, clean_environment())


def script_of(launch: LaunchConfig, action: str, folder: Path) -> str:
    """The script of a job whose ranks run `action`."""
    task = folder / "task.py"
    task.write_text(TASK + action)
    return batch_script(
        launch, [sys.executable, str(task)], name="my run", folder=str(folder), run_dir="my runs"
    )


def start(slurm: FakeSlurm, script: str, **variables: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        ["sbatch"], stdin=subprocess.PIPE, text=True, env={**slurm.variables, **variables}, cwd=slurm.folder
    )
    assert process.stdin is not None
    process.stdin.write(script)
    process.stdin.close()
    return process


def table(**keys: object) -> LaunchConfig:
    return load(tomli_w.dumps({"launch": keys}))[LaunchConfig]


def said(slurm: FakeSlurm, text: str) -> list[int]:
    """The ranks that said `text`."""
    path = slurm.folder / "said"
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted(int(line.split()[0]) for line in lines if line.split(" ", 1)[1] == text)


def test_each_rank_is_a_task_of_its_own(slurm: FakeSlurm) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    action = f"say(' '.join(os.environ[n] for n in {names}))"
    launch = table(nodes=2, gpus_per_node=2, cpus_per_task=3)
    stale = {"RANK": "9", "WORLD_SIZE": "9", "MASTER_ADDR": "elsewhere"}
    assert start(slurm, script_of(launch, action, slurm.folder), **stale).wait(timeout=30) == 0
    expected = ["0 0 0 4 2 localhost", "1 1 1 4 2 localhost", "2 2 0 4 2 localhost", "3 3 1 4 2 localhost"]
    assert sorted((slurm.folder / "said").read_text().splitlines()) == expected
    assert "srun --kill-on-bad-exit=1 --label --cpus-per-task=3" in slurm.log
    assert slurm.log[-1] == "job ended with 0"


@pytest.mark.parametrize("save", [1.0, pytest.param(40.0, marks=pytest.mark.slow)])
def test_ranks_save_before_the_limit_and_the_job_is_queued_again(slurm: FakeSlurm, save: float) -> None:
    """Rank 1 is done at once and must not take rank 0 with it, which saves for `save` seconds."""
    action = (
        f"if os.environ['SLURM_RESTART_COUNT'] == '0': save({save} if rank == 0 else 0)\n"
        "say('went on'); print('output of', rank)"
    )
    process = start(slurm, script_of(table(tasks_per_node=2), action, slurm.folder), FAKE_REQUEUES="3")
    assert within(30, lambda: said(slurm, "ready") == [0, 1] and slurm.srun.exists())
    os.kill(int(slurm.srun.read_text()), signal.SIGUSR1)
    began = time.monotonic()
    assert process.wait(timeout=save + 30) == 0
    assert time.monotonic() - began >= save
    assert said(slurm, "saved") == said(slurm, "went on") == [0, 1]
    assert [line for line in slurm.log if not line.startswith(("srun", "sbatch"))] == [
        "scontrol requeue 4711",
        "job ended with 75",
        "job ended with 0",
    ]
    assert list((slurm.folder / "my runs").iterdir()) == []


def test_the_signal_comes_earlier_than_the_longest_save() -> None:
    launch = load("[run]\nsave_deadline = 200.5\n[launch]\ntime = '1:00:00'")[LaunchConfig]
    assert launch.signal_lead == 261
    assert "#SBATCH --signal=USR1@261\n" in batch_script(launch, ["x"], name="a", folder="/", run_dir="runs")
    assert table().signal_lead == 160
    assert load("[run]\nsave_deadline = 0")[LaunchConfig].signal_lead == 600


@pytest.mark.parametrize(("status", "orderly"), [(2, False), (3, False), (1, False), (143, True), (0, False)])
def test_other_statuses_come_through_and_queue_nothing(slurm: FakeSlurm, status: int, orderly: bool) -> None:
    """Rank 0 ends later, and is killed by srun where rank 1 has failed."""
    settled = f"settle({status}, main=rank == 0)" if orderly else str(status)
    action = f"time.sleep(0 if rank else 1)\n{status} in (1, 2, 3) and keep({status})\nsys.exit({settled})"
    assert start(slurm, script_of(table(tasks_per_node=2), action, slurm.folder)).wait(timeout=30) == 0
    assert slurm.log[-1] == f"job ended with {status}"
    assert not any(line.startswith("scontrol") for line in slurm.log)


def test_a_rank_that_is_killed(slurm: FakeSlurm) -> None:
    action = "os.kill(os.getpid(), 9) if rank else time.sleep(60)"
    assert start(slurm, script_of(table(tasks_per_node=2), action, slurm.folder)).wait(timeout=30) == 0
    assert slurm.log[-1] == "job ended with 137"


def test_a_failure_counts_more_than_a_stop(slurm: FakeSlurm) -> None:
    action = "time.sleep(rank / 2)\nif rank: keep(3); sys.exit(3)\nsys.exit(settle(75, main=rank == 0))"
    assert start(slurm, script_of(table(tasks_per_node=2), action, slurm.folder)).wait(timeout=30) == 0
    assert slurm.log[-1] == "job ended with 3"


def test_a_program_that_knows_nothing_of_this(slurm: FakeSlurm) -> None:
    """It ends with 75, and so does srun."""
    assert start(slurm, script_of(table(), "sys.exit(75)", slurm.folder)).wait(timeout=30) == 0
    assert slurm.log[-2:] == ["scontrol requeue 4711", "job ended with 75"]


def test_requeue_can_be_left_out(slurm: FakeSlurm) -> None:
    script = script_of(table(requeue=False), "sys.exit(settle(75, main=rank == 0))", slurm.folder)
    assert "#SBATCH --no-requeue\n" in script
    assert start(slurm, script).wait(timeout=30) == 0
    assert slurm.log[-1] == "job ended with 75"
    assert not any(line.startswith("scontrol") for line in slurm.log)


def test_setup_runs_before_and_a_fault_in_it_ends_the_job(slurm: FakeSlurm) -> None:
    setup = ["export GREETING='hello  world'", "cd /", 'test "$GREETING" = "hello  world"']
    action = "say(os.environ['GREETING'])"
    launch = table(setup=setup[::2])
    assert start(slurm, script_of(launch, action, slurm.folder)).wait(timeout=30) == 0
    assert said(slurm, "hello  world") == [0]
    assert start(slurm, script_of(table(setup=["false"]), action, slurm.folder)).wait(timeout=30) == 0
    assert slurm.log[-1] == "job ended with 1"
    assert said(slurm, "hello  world") == [0]


def test_words_reach_the_run_as_they_are(slurm: FakeSlurm) -> None:
    words = ["a b", "$HOME", "it's", 'q"q', "--x=[1, 2]", "*"]
    task = slurm.folder / "task.py"
    task.write_text(TASK + "say(repr(sys.argv[1:]))")
    script = batch_script(
        table(), [sys.executable, str(task), *words], name="it's $1", folder=str(slurm.folder), run_dir="a $b"
    )
    assert start(slurm, script).wait(timeout=30) == 0
    assert said(slurm, repr(words)) == [0]
    assert (slurm.folder / "a $b").is_dir()


def test_what_the_job_asks_for() -> None:
    launch = table(
        account="my account", partition="gpu", qos="high", nodes=2, gpus_per_node=4, cpus_per_task=8,
        mem="200G", time="2-00:00:00", sbatch=["--constraint=h200"], srun=["--cpu-bind=none"],
    )  # fmt: skip
    text = batch_script(launch, ["forge", "train"], name="big", folder="/data", run_dir="runs")
    given = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert given == [
        "--job-name=big",
        "'--account=my account'",
        "--partition=gpu",
        "--qos=high",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--cpus-per-task=8",
        "--mem=200G",
        "--time=2-00:00:00",
        "--signal=USR1@160",
        "--output=%x-%j.out",
        "--open-mode=append",
        "--requeue",
        "--constraint=h200",
    ]
    assert "srun --kill-on-bad-exit=1 --label --cpus-per-task=8 --cpu-bind=none forge train" in text


def test_the_command_prints_a_script_that_bash_reads(tmp_path: Path, slurm: FakeSlurm) -> None:
    (tmp_path / "run.toml").write_text("extends = 'quickstart'\n[launch]\nnodes = 2\ntasks_per_node = 2")
    command = [sys.executable, "-m", "forge_core", "launch", "slurm", "run.toml", "--run.name=first"]
    done = subprocess.run(
        command, cwd=tmp_path, env=slurm.variables, capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0
    srun = next(line for line in done.stdout.splitlines() if line.startswith("srun"))
    assert shlex.split(srun)[-4:] == ["forge_core", "train", "run.toml", "--run.name=first"]
    assert not (tmp_path / "log").exists()


def test_submit(tmp_path: Path, slurm: FakeSlurm) -> None:
    config = ["quickstart", "--run.name=first", "--launch.python=['true']"]
    command = [sys.executable, "-m", "forge_core", "launch", "slurm", "--submit"]
    run = {"cwd": tmp_path, "env": slurm.variables, "capture_output": True, "text": True, "timeout": 20}
    done = subprocess.run([*command, *config], **run)  # type: ignore[call-overload]
    assert (done.returncode, done.stdout, done.stderr) == (0, "submitted job 4711\n", "")
    assert slurm.log[0].startswith("sbatch --parsable {'job-name': 'first'")
    assert slurm.log[-1] == "job ended with 0"
    done = subprocess.run([*command, *config, "--launch.partition=absent"], **run)  # type: ignore[call-overload]
    assert done.returncode == 1
    assert (
        done.stderr == "error: sbatch refuses the job: sbatch: error: invalid partition specified: absent\n"
    )
    run["env"] = {**slurm.variables, "PATH": "/nowhere"}
    done = subprocess.run([*command, *config], **run)  # type: ignore[call-overload]
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is no sbatch on this machine\n  hint: ")


def test_a_job_without_a_name_gets_one_to_be_found_again_by(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    text = make_script("quickstart", [])
    name = text.partition("--run.name=")[2].split()[0]
    assert f"#SBATCH --job-name={name}\n" in text
    assert name.startswith("20")


def test_the_configuration_is_checked_for_as_many_ranks_as_the_job_has() -> None:
    with pytest.raises(ConfigError, match="distributed"):
        make_script("quickstart", ["--launch.nodes=3", "--distributed.tp=2"])


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("--launch.time=tomorrow", "no time of Slurm"),
        ("--launch.time=2:00", "ends before the signal"),
        ("--launch.signal_lead=50", "no time for a save"),
        ("--launch.nodes=0", "launch.nodes"),
        ('--launch.setup=["a\\nb"]', "line break"),
        ("--launch.account= ", "no word"),
        ('--launch.srun=["verbose"]', "'verbose' is no option"),
    ],
)
def test_what_cannot_be(flag: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make_script("quickstart", [flag])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("2-12", 216_000), ("2-12:30", 217_800),
     ("1-00:00:01", 86_401), ("UNLIMITED", 0), ("1:2:3:4", None), ("", None)],
)  # fmt: skip
def test_time_limits(text: str, expected: int | None) -> None:
    """Forms from Slurm's manual: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on."""
    assert seconds(text) == expected


def test_the_place_of_a_task() -> None:
    variables = {
        "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "7",
        "SLURM_JOB_ID": "123", "SLURM_STEP_ID": "2",
        "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_TASKS_PER_NODE": "4,3",
    }  # fmt: skip
    assert adopt_slurm(variables)
    assert variables["RANK"] == "5"
    assert variables["LOCAL_RANK"] == "1"
    assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("7", "3")
    assert variables["MASTER_ADDR"] == "gpu07"
    assert variables["MASTER_PORT"] == str(15_000 + 17 * 123 + 2)
    assert not adopt_slurm(variables)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_NTASKS": "4"},  # a shell of salloc
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "RANK": "0", "WORLD_SIZE": "2"},
    ],
)  # fmt: skip
def test_where_srun_has_not_started_several_nothing_changes(variables: dict[str, str]) -> None:
    before = dict(variables)
    assert not adopt_slurm(variables)
    assert variables == before


def test_a_batch_script_is_no_task() -> None:
    variables = {
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "0",
        "SLURMD_NODENAME": "gpu1",
        "SLURM_JOB_NODELIST": "gpu1",
    }
    with pytest.raises(UsageError, match="put srun before"):
        adopt_slurm(variables)
    with pytest.raises(UsageError, match="where the ranks meet"):
        adopt_slurm({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu1", "gpu1"), ("gpu[03-05,9],login", "gpu03"), ("a1,b2", "a1"), ("r[1-2]n[03,5]", "r1n03"),
     ("node-[7].cluster", "node-7.cluster")],
)  # fmt: skip
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_restarts_are_counted() -> None:
    assert restarts({}) == 0
    assert restarts({"TORCHELASTIC_RESTART_COUNT": "2"}) == 2
    assert restarts({"SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}) == 1
