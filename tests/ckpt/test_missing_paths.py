"""Folders that a run needs and that are not there are named before it starts, by the check of its file."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckptkit import plugins_for, run

from forge_ckpt.hf.opening import kind_of
from forge_ckpt.stored import find_store
from forge_core.commands.loading import load
from forge_core.config import ConfigError


@pytest.mark.parametrize("key", ["model.init_from", "checkpoint.resume"])
def test_a_folder_that_is_not_there(key: str, tmp_path: Path) -> None:
    table, name = key.split(".")
    text = f'extends = "quickstart"\n[{table}]\n{name} = "{tmp_path / "none"}"\n'
    if table != "checkpoint":
        text += "[checkpoint]\n"
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=rf"{key}: there is nothing at {tmp_path / 'none'}"):
        load(str(tmp_path / "run.toml"), [], plugins=plugins_for(), starting=True)
    # whoever only reads the configuration, of a checkpoint that has moved for instance, needs no folder
    load(str(tmp_path / "run.toml"), [], plugins=plugins_for())
    (tmp_path / "none").mkdir()
    load(str(tmp_path / "run.toml"), [], plugins=plugins_for(), starting=True)
    address = [f"--{key}=s3://bucket/none"]
    load(str(tmp_path / "run.toml"), address, plugins=plugins_for(), starting=True)


@pytest.mark.parametrize("url", ["", "s3://", "s3:", "s3:/bucket/runs", "gs:bucket", "file://"])
def test_an_address_that_names_no_place(url: str) -> None:
    """It would be a folder of that name on this machine."""
    with pytest.raises(ConfigError, match=r"checkpoint\.url: .* names no place \(a folder, or an address"):
        load("quickstart", [f"--checkpoint.url={url}"], plugins=plugins_for())


def test_home_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run(tmp_path, steps=2)
    (store, _), (elsewhere, _) = find_store("~/a"), find_store(str(tmp_path / "a"))
    assert store.names() == elsewhere.names() != []
    assert kind_of("~/a") == "checkpoint"
    with pytest.raises(ConfigError, match=r"checkpoint\.url: no home folder ~no-such-user is known here"):
        load("quickstart", ["--checkpoint.url=~no-such-user/x"], plugins=plugins_for())


@pytest.mark.parametrize("url", ["s3://bucket", "memory://", "runs/kept", "C:/runs", "/data"])
def test_an_address_or_a_folder(url: str) -> None:
    load("quickstart", [f"--checkpoint.url={url}"], plugins=plugins_for())
