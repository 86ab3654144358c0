"""Torn and damaged checkpoints: noticed, named, passed over on auto-resume, refused when asked for."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
from ckptkit import names, plugins_for, run
from test_loading import Counter

from forge_ckpt import open_checkpoint
from forge_ckpt.errors import CheckpointError, DamagedError
from forge_ckpt.manifest import FileSum, checksum, parse_manifest
from forge_ckpt.reading import SavedCheckpoint
from forge_ckpt.store import LocalStore
from forge_core.commands.main import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six updates, saved after 3 and 6."""
    folder = tmp_path_factory.mktemp("saved")
    run(folder, steps=6, checkpoint={"interval": 3}, scheduler={"name": "constant"})
    return folder


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def no_index(folder: Path) -> None:
    (folder / "index.json").unlink()


def missing_shard(folder: Path) -> None:
    (folder / "weights_00000.safetensors").unlink()


def half_a_shard(folder: Path) -> None:
    os.truncate(folder / "optimizer_00000.safetensors", 5000)


def missing_rank_state(folder: Path) -> None:
    (folder / "state_00000.json").unlink()


def flipped_bit(folder: Path) -> None:
    path = folder / "weights_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    path.write_bytes(data)


def only_unfinished(folder: Path) -> None:
    folder.rename(folder.with_name(".saving_step_00000006_0123abcd"))


TORN = (
    empty,
    no_manifest,
    no_index,
    missing_shard,
    half_a_shard,
    missing_rank_state,
    flipped_bit,
    only_unfinished,
)


@pytest.mark.parametrize("damage", TORN)
def test_auto_resume_takes_the_one_before(
    damage: Callable[[Path], None], saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True, symlinks=True)
    damage(tmp_path / "a/checkpoints/step_00000006")
    constant = {"name": "constant"}
    straight = run(tmp_path / "straight", steps=8, scheduler=constant)
    with caplog.at_level(logging.WARNING, logger="forge"):
        resumed = run(tmp_path, steps=8, checkpoint={"interval": 3}, scheduler=constant)
    assert resumed.losses == straight.losses[3:]
    if damage is not only_unfinished:
        naming = [r for r in caplog.records if "step_00000006 is not used" in r.getMessage()]
        assert len(naming) == 1
    assert names(tmp_path) == ["latest", "step_00000003", "step_00000006", "step_00000008"]
    assert SavedCheckpoint(LocalStore(tmp_path / "a/checkpoints"), "step_00000006").verify() == []


@pytest.mark.parametrize("damage", [d for d in TORN if d is not only_unfinished])
def test_one_that_is_asked_for_is_refused(
    damage: Callable[[Path], None], saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved / "a/checkpoints/step_00000006", tmp_path / "step_00000006")
    damage(tmp_path / "step_00000006")
    with pytest.raises(CheckpointError, match="step_00000006"):
        run(tmp_path, steps=8, checkpoint={"resume": str(tmp_path / "step_00000006")})


def test_pointer_to_nowhere(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True, symlinks=True)
    shutil.rmtree(tmp_path / "a/checkpoints/step_00000006")
    assert open_checkpoint(tmp_path / "a").manifest.step == 3
    assert len(run(tmp_path, steps=6, checkpoint={"interval": 3}).losses) == 3


def test_nothing_whole_is_an_error_and_no_fresh_start(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True, symlinks=True)
    for name in ("step_00000003", "step_00000006"):
        flipped_bit(tmp_path / "a/checkpoints" / name)
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        run(tmp_path, steps=6)


READERS: dict[str, Callable[[SavedCheckpoint], Any]] = {
    "manifest.json": lambda saved: SavedCheckpoint(saved.store, saved.name),
    "index.json": lambda saved: saved.index,
    "state.json": lambda saved: saved.state(),
    "config.toml": lambda saved: saved.config_text,
}


@pytest.mark.parametrize("file", READERS)
def test_brackets_without_end_are_damage(file: str, saved: Path, tmp_path: Path) -> None:
    """Parsers give up on them with an error of another kind."""
    target = tmp_path / "step_00000006"
    shutil.copytree(saved / "a/checkpoints/step_00000006", target)
    opened = SavedCheckpoint(LocalStore(tmp_path), target.name)
    (target / file).write_text("a = " * file.endswith("toml") + "[" * 100_000)
    with pytest.raises(DamagedError, match=f"{file} cannot be read"):
        READERS[file](opened)


def noticed(target: Path) -> str:
    """What is said of a checkpoint, whether when it is opened or when it is verified."""
    try:
        return " ".join(map(str, open_checkpoint(target).verify()))
    except DamagedError as error:
        return str(error)


def test_any_change_to_any_file_is_noticed(saved: Path, tmp_path: Path) -> None:
    """One flipped bit at random places of every file, a cut, and a file that is gone."""
    generator = random.Random(0)
    source = saved / "a/checkpoints/step_00000006"
    files = sorted(p.name for p in source.iterdir())
    for number, file in enumerate(files * 6):
        target = tmp_path / f"{number}" / source.name
        shutil.copytree(source, target)
        data = bytearray((target / file).read_bytes())
        kind = number // len(files)
        if kind == 0:
            (target / file).unlink()
        elif kind == 1:
            (target / file).write_bytes(data[: generator.randrange(len(data))])
        else:
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
            (target / file).write_bytes(data)
        assert file in noticed(target)
        shutil.rmtree(target.parent)


def test_a_pickle_under_our_names_executes_nothing(tmp_path: Path) -> None:
    """Each file in turn, those of plugins too, is a pickle that would make a file; nothing ever opens one,
    also where the manifest says that it is what was written.
    """
    proof = tmp_path / "executed"
    evil = f"cos\nsystem\n(S'touch {proof}'\ntR.".encode()
    plugins = plugins_for(hooks=Counter().hooks())
    run(tmp_path / "saved", plugins=plugins, steps=2)
    source = tmp_path / "saved/a/checkpoints/step_00000002"
    manifest = parse_manifest((source / "manifest.json").read_bytes())
    files = sorted(str(p.relative_to(source)) for p in source.rglob("*") if p.is_file())
    assert {"extras/test/counter.json", "extras/test/counter.safetensors"} < set(files)
    for number, file in enumerate([*files, ".metadata"]):
        target = tmp_path / f"{number}" / source.name
        shutil.copytree(source, target)
        (target / file).write_bytes(evil)

        def go_on(verify: bool, target: Path = target) -> None:
            again = plugins_for(hooks=Counter().hooks())
            run(target.parent, plugins=again, steps=3, checkpoint={"resume": str(target), "verify": verify})

        if file in files:
            with pytest.raises(CheckpointError):
                go_on(verify=True)
        if file in manifest.files:
            forged = {**manifest.files, file: FileSum(len(evil), checksum(evil))}
            (target / "manifest.json").write_text(attrs.evolve(manifest, files=forged).to_text())
        with suppress(CheckpointError):  # one that resuming does not look at may load
            go_on(verify=False)
        for command in (["ls", "--json"], ["verify"], ["diff", str(source)]):
            assert main(["checkpoint", *command, str(target)]) in (0, 1)
        assert not proof.exists()


def test_a_save_that_was_cut_in_the_middle_of_replacing(saved: Path, tmp_path: Path) -> None:
    """The old checkpoint of the step lay aside when the process ended: it comes back."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True, symlinks=True)
    folder = tmp_path / "a/checkpoints"
    (folder / "step_00000006").rename(folder / ".replaced_step_00000006_0123abcd")
    assert run(tmp_path, steps=6, checkpoint={"interval": 3}).losses == []
    assert names(tmp_path) == ["latest", "step_00000003", "step_00000006"]
