"""Paths as users write them: home folders, known and unknown, and names that no file system takes."""

from __future__ import annotations

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
    keys = ("run.dir", "data.cache_dir", "checkpoint.url")
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


def test_a_user_without_a_home_is_told_where_the_cache_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("forge_core.files._expanded", str)
    assert user_path("~/x") == Path("~/x")
    with pytest.raises(DataError, match=r"(?s)no home folder.*set data\.cache_dir"):
        cache_folder(None)
