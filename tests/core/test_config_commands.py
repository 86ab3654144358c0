"""Configuration at the command line: status 2 and the path before anything runs; quick, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_core.commands.main import main

FAULTS = {
    "misspelt key": ("[optimizer]\nlearning_rate = 1", [], "optimizer.learning_rate"),
    "right key at top level": ("lr = 1e-4", [], "lr"),
    "unknown table": ("[xyz]\na = 1", [], "xyz"),
    "second item of an array": (
        "[[freeze.stages]]\nstart_step = 1\n[[freeze.stages]]\nstart_stp = 2",
        [],
        "freeze.stages.1.start_stp",
    ),
    "misspelt flag": ("", ["--optimizer.lrr=1"], "optimizer.lrr"),
    "no such data": ("", ["--data.path=none.txt"], "data.path"),
    "no such source": (
        "[[data.mix]]\nname = 'a'\nsource = 'jsonl'\npath = 'none.jsonl'",
        [],
        "data.mix.0.path",
    ),
}


def forge(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "forge_core", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=10
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_a_run_before_it_starts(fault: str, tmp_path: Path) -> None:
    text, flags, path = FAULTS[fault]
    (tmp_path / "run.toml").write_text(text)
    done = forge(tmp_path, "train", "run.toml", *flags)
    assert done.returncode == 2
    assert f"{path}: " in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.toml"]


def test_a_sound_file_passes(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "extends = 'quickstart'\n[optimizer]\nlr = 1\n[[freeze.stages]]\nstart_step = 1"
    )
    assert forge(tmp_path, "check", "run.toml", "--optimizer.lr=1e-4").returncode == 0


def test_a_stray_word_is_named(tmp_path: Path) -> None:
    done = forge(tmp_path, "check", "quickstart", "--train.seed", "5")
    assert done.returncode == 2
    assert "--train.seed=5" in done.stderr


@pytest.mark.parametrize(
    ("words", "error", "way"),
    [
        (["train", "--nprocs", "2"], "no option --nprocs", "did you mean --nproc?"),
        (["check", "quickstart", "--worldsize=2"], "no option --worldsize", "did you mean --world-size?"),
        (["train", "--nproc", "x"], "argument --nproc: invalid int value: 'x'", "see forge train --help"),
        (["data", "prepare"], "the following arguments are required: --out", "see forge data prepare --help"),
        # with its value apart, argparse takes the value for CONFIG
        (["check", "--optimizer.lr", "3"], "'3' is not a flag", "write --optimizer.lr=3"),
        (["check", "--optimizer.lr", "3", "quickstart"], "'3' is not a flag", "write --optimizer.lr=3"),
    ],
)
def test_misspelt_options_and_values_apart(
    words: list[str], error: str, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: {error}\n  hint: {way}\n"


@pytest.mark.parametrize("command", ["check", "explain"])
@pytest.mark.parametrize("size", ["0", "-2"])
def test_a_number_of_processes_that_is_none(
    command: str, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "quickstart", "--world-size", size]) == 2
    assert f"error: {size} is no number of processes" in capsys.readouterr().err


def test_a_value_may_hold_spaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With CONFIG before the flag, after it, and without CONFIG; the flag is told with what is wrong."""
    (tmp_path / "a b.txt").write_text("some text")
    flags = [f"--data.path={tmp_path}/a b.txt", "--optimizer.betas=[0.8, 0.9]"]
    for words in (["quickstart", *flags], [*flags, "quickstart"], flags):
        assert main(["check", *words]) == 0
    capsys.readouterr()
    for words in (["quickstart", "--data.path=no where"], ["--data.path=no where"]):
        assert main(["check", *words]) == 2
        assert capsys.readouterr().err.startswith("error: --data.path=no where: data.path: there is no file")


def test_a_bare_flag_before_the_configuration() -> None:
    assert main(["check", "--run.strict_plugins", "quickstart"]) == 0


def test_recipes_are_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "recipes"]) == 0
    name, *lines = f"\n{capsys.readouterr().out}".split("\nquickstart\n", 1)[1].splitlines()
    assert name.startswith("    A small byte-level model on text")
    assert lines[1].endswith("forge_core/recipes/quickstart.toml")
    assert main(["config", "recipes", "train"]) == 2


def test_ctrl_c_before_there_is_a_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(name: str, arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("forge_core.commands.main.dispatch", press)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "stopped by SIGINT\n"
    monkeypatch.setenv("RANK", "1")  # of several ranks one says so
    assert main(["train"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.alone
def test_help_and_check_take_less_than_two_fifths_of_a_second(tmp_path: Path) -> None:
    for words in (["--help"], ["check"]):
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            assert forge(tmp_path, *words).returncode == 0
            seconds.append(time.perf_counter() - start)
        print(f"forge {words[0]}: {min(seconds):.3f} s")
        assert min(seconds) <= 0.4
