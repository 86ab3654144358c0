"""Looking at checkpoints of a run that is under way: it saves new ones meanwhile and removes old ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from ckptkit import run

import forge_ckpt.reading
from forge_ckpt import open_checkpoint
from forge_ckpt.errors import RemovedError, RequestError
from forge_ckpt.objects import ObjectStore
from forge_ckpt.store import LocalStore
from forge_core.commands.main import main


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of updates 1, 2 and 3, not to be changed."""
    folder = tmp_path_factory.mktemp("ran")
    run(folder, steps=3)
    return folder


@pytest.fixture
def folder(ran: Path, tmp_path: Path) -> Path:
    """The checkpoints of a copy of it."""
    shutil.copytree(ran / "a", tmp_path / "a", symlinks=True)
    return tmp_path / "a/checkpoints"


def goes_on(folder: Path) -> None:
    """What a run does between two looks: it saves update 4 and keeps nothing else."""
    store = LocalStore(folder)
    shutil.copytree(folder / "step_00000003", folder / "step_00000004")
    store._point_latest("step_00000004", "00")
    for step in (1, 2, 3):
        store.remove(f"step_0000000{step}")


def once_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, then: Any, call: int = 1) -> None:
    """Do `then` when a function has been called for the `call`-th time, before its caller goes on."""
    real, calls = getattr(owner, name), iter(range(1, 1000))

    def called(*arguments: Any) -> Any:
        answer = real(*arguments)
        if next(calls) == call:
            then()
        return answer

    monkeypatch.setattr(owner, name, called)


@pytest.mark.parametrize(
    ("place", "seam"),
    [("", "find_store"), ("checkpoints", "complete"), ("checkpoints/latest", "find_store")],
)
def test_what_goes_before_it_is_open_is_passed_over(
    place: str, seam: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once_after(monkeypatch, forge_ckpt.reading, seam, lambda: goes_on(folder))
    assert open_checkpoint(folder.parent / place).name == "step_00000004"


def test_one_that_was_named_and_goes_is_not_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once_after(monkeypatch, forge_ckpt.reading, "find_store", lambda: goes_on(folder))
    with pytest.raises(RequestError, match=r"there is no checkpoint .*step_00000002"):
        open_checkpoint(folder / "step_00000002")


def test_what_is_open_is_read_to_the_end(ran: Path, folder: Path) -> None:
    saved, same = open_checkpoint(folder), open_checkpoint(ran / "a")
    goes_on(folder)
    assert saved.name == "step_00000003"
    assert saved.config_text == same.config_text
    for name in same.index.tensors:
        assert torch.equal(saved.tensor(name), same.tensor(name)), name
    assert saved.state() == same.state()


@pytest.fixture
def address() -> Iterator[str]:
    fs = fsspec.filesystem("memory")
    yield "memory://bucket/reading"
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def test_objects_that_go_meanwhile_are_said_to_have_gone(address: str, tmp_path: Path) -> None:
    """What lies in an object store is read when it is needed, and cannot be held."""
    run(tmp_path, steps=2, checkpoint={"url": address})
    saved = open_checkpoint(f"{address}/a")
    ObjectStore(f"{address}/a").remove("step_00000002")
    with pytest.raises(RemovedError, match="step_00000002 was removed while it was read") as caught:
        saved.tensor("model/embed.weight")
    assert "checkpoint.keep_last" in caught.value.hint
    assert open_checkpoint(f"{address}/a").name == "step_00000001"


@pytest.mark.parametrize("verb", ["ls", "verify"])
def test_lists_leave_out_what_has_gone(
    verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = LocalStore(folder).remove
    once_after(monkeypatch, LocalStore, "names", lambda: gone("step_00000001"), call=2)
    assert main(["checkpoint", verb, str(folder.parent)]) == 0
    told = capsys.readouterr().out
    assert "step_00000001" not in told
    assert "step_00000002" in told
    assert "step_00000003" in told


def test_a_run_may_be_called_like_a_checkpoint(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.parent.rename(tmp_path / "step_one")
    assert open_checkpoint(tmp_path / "step_one").name == "step_00000003"
    assert main(["checkpoint", "ls", str(tmp_path / "step_one"), "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [1, 2, 3]
