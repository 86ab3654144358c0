"""Paths as users write them: home folders, known and unknown, and names that no file system takes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from forge_core.commands.launch import make_script
from forge_core.commands.main import main
from forge_core.data.cache import cache_folder
from forge_core.errors import DataError
from forge_core.files import user_path
from forge_core.loop.folder import RunFolder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_run_lies_in_the_home_folder_and_not_in_one_called_tilde(home: Path) -> None:
    assert RunFolder.of("~/runs", "a").path == home / "runs" / "a"
    assert RunFolder.of("./~/runs", "a").path == Path("~/runs/a")
    script = make_script("quickstart", ["--run.dir=~/runs"])
    assert f"mkdir -p -- {home}/runs" in script


def test_a_folder_of_nobody_is_refused_before_it_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("run.dir", "data.cache_dir")
    assert main(["check", "quickstart", *(f"--{key}=~no-such-user/x" for key in keys)]) == 2
    said = capsys.readouterr().err
    for key in keys:
        assert f"{key}: no home folder ~no-such-user is known here (write the whole path" in said
    assert main(["check", "quickstart", "--run.dir=./~no-such-user/x"]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["check", "~no-such-user/a.toml"],
        ["check", "quickstart", "--data.tokenizer=~no-such-user/tokenizer.json"],
        ["check", "quickstart", f"--data.tokenizer={'x' * 5000}"],
        ["check", "quickstart", "--data.path=~no-such-user/text"],
        ["check", "quickstart", "--model.ffn_hidden_dim=none", "--model.ffn_dim_multiplier=1e308"],
        [
            *("check", "quickstart", "--model.ffn_hidden_dim=none", "--model.n_heads=1"),
            *("--model.head_dim=2", f"--model.dim=1{'0' * 400}"),
        ],
    ],
)
def test_what_cannot_be_is_a_problem_of_the_configuration(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "Error" not in capsys.readouterr().err


@pytest.mark.parametrize("key", ["run.name", "run.dir", "data.path", "data.cache_dir"])
def test_no_text_holds_a_null(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, _, name = key.partition(".")
    file = tmp_path / "a.toml"
    file.write_text(f'[{table}]\n{name} = "a\\u0000b"\n')
    assert main(["check", str(file)]) == 2
    assert f"a.toml:2: {key}: holds the character NUL" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\nb", "a\u202eb", "x" * 256, "ä" * 128])
def test_names_that_no_folder_can_have(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "quickstart", f"--run.name={name}"]) == 2
    assert "run.name: " in (said := capsys.readouterr().err)
    assert "is not a folder name" in said


@pytest.mark.parametrize("name", ["x" * 255, "Läufe 1", "..."])
def test_names_that_a_folder_can_have(name: str) -> None:
    assert main(["check", "quickstart", f"--run.name={name}"]) == 0


@pytest.mark.parametrize("words", [["train", "--nproc", "2"], ["launch", "slurm"]])
def test_a_pipe_is_no_configuration_of_several_processes(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    try:
        assert main([*words, f"/dev/fd/{read}"]) == 2
        assert f"/dev/fd/{read} can be read once" in capsys.readouterr().err
    finally:
        os.close(read)
        os.close(write)


def test_a_rank_of_several_refuses_a_pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    os.mkfifo(tmp_path / "a.toml")
    assert main(["train", str(tmp_path / "a.toml")]) == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [(b"[model]\ndimm = 3\n", "did you mean dim?"), (b"[model]\ndim = 8\n\xff", "a.toml:3: is not UTF-8")],
)
def test_a_pipe_is_read_once_whatever_is_in_it(
    text: bytes,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also to say which line is at fault; and somebody who forgot to write to it is told."""
    monkeypatch.setattr("forge_core.config.files.PATIENCE", 0.2)
    pipe, done, again = tmp_path / "a.toml", threading.Event(), []
    os.mkfifo(pipe)

    def write() -> None:
        time.sleep(0.5)
        pipe.write_bytes(text)
        if not done.wait(5):
            again.append(True)
            pipe.write_bytes(b"")

    writer = threading.Thread(target=write)
    writer.start()
    status = main(["check", str(pipe)])
    done.set()
    writer.join()
    said = capsys.readouterr().err
    assert (status, again) == (2, [])
    assert told in said
    assert f"waiting for what is written to {pipe}" in said


@pytest.mark.parametrize("step", [[], ["--step", "1"]])
def test_what_cannot_be_looked_at_is_told(step: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", "x" * 5000, *step]) == 2
    assert "cannot read xxx" in (said := capsys.readouterr().err)
    assert "File name too long" in said


def test_a_user_without_a_home_is_told_where_the_cache_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("forge_core.files._expanded", str)
    assert user_path("~/x") == Path("~/x")
    with pytest.raises(DataError, match=r"(?s)no home folder.*set data\.cache_dir"):
        cache_folder(None)
