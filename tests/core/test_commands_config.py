"""What `forge check` and `forge config` print."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.commands import new
from forge_core.commands.main import main


def test_each_problem_is_an_error_in_the_order_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below.toml").write_text("[optimizer]\nlrr = 1\n")
    text = "extends = 'below.toml'\n[data]\npath = 'none.txt'\n[model]\ndim = 'x'\n[train]\nsed = 1\n"
    (tmp_path / "run.toml").write_text(text)
    assert main(["check", "run.toml", "--train.seq_len=0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    starts = [
        "run.toml:3: data.path: ",
        "run.toml:5: model.dim: ",
        "run.toml:7: train.sed: ",
        "below.toml:2: optimizer.lrr: ",
        "--train.seq_len=0: train.seq_len: ",
    ]
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(f"error: {start}"), line


def test_problems_of_a_rank_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["check", "quickstart", "--train.sed=1", "--model.dims=8"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: rank 1: --") for line in lines)


@pytest.mark.parametrize(("size", "words"), [(1, "1 process;"), (2, "2 processes;")])
def test_check_counts_processes(size: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "quickstart", f"--distributed.tp={size}"]) == 0
    assert f"can be trained on {words}" in capsys.readouterr().out


def test_a_mesh_without_processes_names_nproc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart", "--distributed.tp=2"]) == 2
    assert "--nproc 2" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_both_ways_in_one_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one, mix = "[data]\nsource = 'synthetic'\n", "[[data.mix]]\nname = 'x'\n"
    (tmp_path / "both.toml").write_text(one + mix)
    assert main(["check", "both.toml"]) == 2
    assert "both.toml:2: data.source: a mixture names its own sources" in capsys.readouterr().err
    (tmp_path / "one.toml").write_text(one)
    (tmp_path / "child.toml").write_text("extends = 'one.toml'\n" + mix)
    assert main(["check", "child.toml"]) == 0


def test_reference_of_some_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference", "train", "guard", "train"]) == 0
    text = capsys.readouterr().out
    headers = [line for line in text.splitlines() if line.startswith("## `[") and "." not in line]
    assert headers == ["## `[train]`", "## `[guard]`"]
    assert "`seq_len`" in text


def test_reference_of_a_table_inside_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference", "optimizer.muon", "data.mix"]) == 0
    headers = [line for line in capsys.readouterr().out.splitlines() if line.startswith("## ")]
    assert headers[:2] == ["## `[optimizer.muon]`", "## `[[data.mix]]`"]
    assert all(header.startswith("## `[data.mix.") for header in headers[2:])
    assert main(["config", "reference", "optimizer.muoon"]) == 2
    told = capsys.readouterr()
    assert "no table [optimizer.muoon]" in told.err
    assert "did you mean optimizer.muon?" in told.err
    assert told.out == ""


def test_a_sequence_that_is_too_long_says_how_long_it_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "quickstart", "--model.max_seq_len=64", "--eval.sample_tokens=8"]) == 2
    assert "set train.seq_len to at most 64" in capsys.readouterr().err


def test_reference_of_a_table_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    for word, hint in {
        "trian": "did you mean train?",
        "optimiser.muon": "did you mean optimizer?",
        "zzzz": "tables: run, model, data",
    }.items():
        assert main(["config", "reference", "run", word]) == 2
        told = capsys.readouterr()
        assert f"no table [{word}]" in told.err
        assert hint in told.err
        assert told.out == ""
    assert main(["config", "schema", "train"]) == 2
    assert "leave out train" in capsys.readouterr().err


def test_help_says_what_is_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    assert "Data is not read" in capsys.readouterr().out


def test_the_readme_of_a_new_package_installs_as_the_command_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "shift", "--dir", str(tmp_path)]) == 0
    (said,) = [line.strip() for line in capsys.readouterr().out.splitlines() if "pip install" in line]
    folder = tmp_path / "forge-shift"
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert said.replace(str(folder), ".") in [line.strip() for line in readme.splitlines()]
    assert new.MARKER not in readme
