"""Disks that are full, folders one may not write to, failures in the background."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ckptkit import names, plugins_for, run

import forge_ckpt.store
from forge_ckpt import open_checkpoint
from forge_ckpt.errors import CheckpointError, RequestError
from forge_ckpt.stored import find_store
from forge_core.contract.runtime import Observer

NOBODY = 65534


@contextmanager
def spied(monkeypatch: pytest.MonkeyPatch, before: Callable[[Path], None]) -> Iterator[list[Path]]:
    """Call `before` with the path of every file about to be written."""
    real = forge_ckpt.store.write_file
    written: list[Path] = []

    def write(path: Path, parts: Any) -> Any:
        written.append(path)
        before(path)
        return real(path, parts)

    with monkeypatch.context() as patch:
        patch.setattr(forge_ckpt.store, "write_file", write)
        yield written


def full_at(step: int) -> Callable[[Path], None]:
    def before(path: Path) -> None:
        if f"step_{step:08d}" in str(path) and "optimizer" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    return before


class Steps(Observer):
    def __init__(self) -> None:
        self.last = 0

    def step_end(self, session: Any, step: int, result: Any) -> None:
        time.sleep(0.05)
        self.last = step


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_full_disk_keeps_what_was_there(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Steps()
    table = {"interval": 2, "keep_last": 1, "mode": mode}
    plugins = plugins_for(hooks={"observers": [seen]})
    with spied(monkeypatch, full_at(4)), pytest.raises(CheckpointError, match="No space left") as caught:
        run(tmp_path, plugins=plugins, steps=8, checkpoint=table)
    assert "earlier checkpoints are as they were" in str(caught.value)
    assert seen.last <= 6  # known by the next save at the latest
    assert names(tmp_path) == ["latest", "step_00000002"]
    assert open_checkpoint(tmp_path / "a/checkpoints/latest").verify() == []
    ended = json.loads((tmp_path / "a/exit.json").read_text())
    assert ended["status"] == 1
    assert "No space left" in ended["reason"]
    assert "\n" not in ended["reason"]
    assert ended["hint"].startswith("earlier checkpoints are as they were; free some space")
    run(tmp_path, steps=8, checkpoint=table)
    assert names(tmp_path) == ["latest", "step_00000008"]


def test_a_failure_in_the_background_is_known_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of three saves fails, of update 2 of 6: nothing ever points to it."""
    seen = Steps()
    plugins = plugins_for(hooks={"observers": [seen]})
    with spied(monkeypatch, full_at(2)), pytest.raises(CheckpointError, match="No space left"):
        run(tmp_path, plugins=plugins, steps=6, checkpoint={"interval": 2, "mode": "async"})
    assert seen.last <= 4
    assert names(tmp_path) == []


def test_an_error_of_training_is_not_masked_by_a_save_that_fails_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fault(Observer):
        def step_end(self, session: Any, step: int, result: Any) -> None:
            if step == 3:
                raise ValueError("of training")

    def late(path: Path) -> None:
        time.sleep(0.3)
        full_at(2)(path)

    plugins = plugins_for(hooks={"observers": [Fault()]})
    with spied(monkeypatch, late), pytest.raises(ValueError, match="of training"):
        run(tmp_path, plugins=plugins, steps=6, checkpoint={"interval": 2, "mode": "async"})
    assert json.loads((tmp_path / "a/exit.json").read_text())["reason"].startswith("ValueError: of training")
    assert names(tmp_path) == []


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_failing_final_save_fails_the_run(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with spied(monkeypatch, full_at(6)), pytest.raises(CheckpointError, match="No space left"):
        run(tmp_path, steps=6, checkpoint={"interval": 4, "mode": mode})
    assert names(tmp_path) == ["latest", "step_00000004"]


def test_an_old_one_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def remove(self: Any, name: str) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(forge_ckpt.store.LocalStore, "remove", remove)
    assert run(tmp_path, steps=2, checkpoint={"keep_last": 1}).status == 0
    told = "".join(capsys.readouterr().err.split())  # a line may be folded
    assert "warning:cannotremovetheoldcheckpoint" in told
    assert "step_00000001" in told
    assert "Permissiondenied" in told


def test_one_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save of a step that has a checkpoint already, whose last move fails."""
    run(tmp_path, steps=2, checkpoint={"interval": 2})
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name.startswith(".saving_"):
            raise OSError(errno.EIO, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match="Input/output error"):
        run(tmp_path, steps=2, checkpoint={"interval": 2, "resume": False})
    assert names(tmp_path) == ["latest", "step_00000002"]
    assert open_checkpoint(tmp_path / "a/checkpoints/latest").verify() == []


def test_a_folder_that_appears_meanwhile_does_not_stop_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, raised = Path.mkdir, []

    def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if "step_" in self.name and not raised:
            raised.append(self)
            real(self, *args, **kwargs)  # another rank made it first

    monkeypatch.setattr(Path, "mkdir", mkdir)
    run(tmp_path, steps=1)
    assert raised
    assert names(tmp_path) == ["latest", "step_00000001"]


def test_the_pointer_is_never_absent(tmp_path: Path) -> None:
    """A reader looks while saves happen; it always finds a complete checkpoint."""
    latest = tmp_path / "a/checkpoints/latest"
    table = {"mode": "async", "keep_last": 2}
    run(tmp_path, steps=20, checkpoint={"interval": 20, **table})  # the first pointer
    looks: list[bool] = []
    ended = threading.Event()

    def look() -> None:
        while len(looks) < 10000 or not ended.is_set():
            looks.append((latest / "manifest.json").exists())

    reader = threading.Thread(target=look)
    reader.start()
    run(tmp_path, plugins=plugins_for(hooks={"observers": [Steps()]}), steps=40, checkpoint=table)
    ended.set()
    reader.join()
    assert len(looks) >= 10000
    assert all(looks)


def forge(cwd: Path, *flags: str, preamble: str = "") -> Any:
    code = f"import os, sys, torch\n{preamble}\n"
    code += "from forge_core.commands.main import run\nrun()"
    small = ["--model.dim=16", "--model.n_layers=1", "--model.n_heads=2", "--train.seq_len=8"]
    small += ["--train.batch_size=2", "--train.max_steps=4", "--data.source=synthetic", "--run.name=a"]
    small += ["--eval.sample_tokens=0", "--eval.at_end=false", "--checkpoint.interval=1", "--run.dir=."]
    return subprocess.run(
        [sys.executable, "-c", code, "train", "quickstart-saved", *small, *flags],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "HOME": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"},
    )


def assert_one_clear_line(result: Any, *words: str, status: int = 1) -> None:
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error:")]) == 1
    for word in words:
        assert word in result.stderr


def test_limit_on_file_size(tmp_path: Path) -> None:
    """The real call fails in the middle of a file, as it does on a full disk."""
    assert forge(tmp_path, "--train.max_steps=2").returncode == 0
    limit = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
    assert_one_clear_line(forge(tmp_path, preamble=limit), "File too large", "earlier checkpoints")
    saved = open_checkpoint(tmp_path / "a")
    assert saved.manifest.step == 2
    assert saved.verify() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not write")
def test_folder_of_another_user(tmp_path: Path) -> None:
    assert forge(tmp_path, "--train.max_steps=2").returncode == 0
    for path in (tmp_path, tmp_path / "a"):
        path.chmod(0o777)
    for path in (tmp_path / "a").iterdir():
        if path.is_file():
            path.chmod(0o666)
    for parent in tmp_path.parents:
        if parent.name.startswith("pytest"):
            parent.chmod(0o755)
    (tmp_path / "a/checkpoints").chmod(0o755)  # theirs to read, not to write
    become = (  # another user may not be allowed to read this Python: everything is imported before
        "from forge_ckpt.checkpointer import RunCheckpointer\n"
        "import forge_ckpt.choosing, forge_ckpt.resuming, forge_core.loop.run\n"
        "real = RunCheckpointer.save\n"
        "def save(*arguments):\n"
        f"    os.setegid({NOBODY}); os.seteuid({NOBODY})\n"
        "    real(*arguments)\n"
        "RunCheckpointer.save = save"
    )
    assert_one_clear_line(forge(tmp_path, preamble=become), "checkpoints", "Permission denied")
    assert open_checkpoint(tmp_path / "a").verify() == []


@contextmanager
def as_nobody() -> Iterator[None]:
    """Be another user, one that owns nothing."""
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def let_in(folder: Path) -> None:
    """Let other users look for what is in a folder of pytest, which keeps its own for itself."""
    for parent in (folder, *folder.parents):
        if parent.stat().st_mode & 0o077 == 0:
            parent.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not look")
@pytest.mark.parametrize(
    ("place", "mode", "words"),
    [("a/checkpoints", 0o700, "read there"), ("a/checkpoints", 0o755, "write there"), ("a", 0o700, "denied")],
)
def test_a_folder_that_cannot_be_used_ends_the_start(
    place: str, mode: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forge_ckpt.checkpointer import RunCheckpointer

    run(tmp_path, steps=2)
    let_in(tmp_path)
    (tmp_path / "a").chmod(0o777)
    (tmp_path / place).chmod(mode)
    tidy = RunCheckpointer._tidy

    def as_another(self: Any) -> None:
        with as_nobody():
            tidy(self)

    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpointer, "_tidy", as_another)
        with pytest.raises(RequestError, match=r"cannot use .*a/checkpoints") as caught:
            run(tmp_path, steps=4)
    assert words in caught.value.message.lower()
    assert "\n" not in caught.value.message
    assert "checkpoint.url" in caught.value.hint
    assert caught.value.exit_status == 2
    if mode == 0o700:
        with as_nobody(), pytest.raises(RequestError, match="cannot"):
            find_store(tmp_path / "a")
    assert open_checkpoint(tmp_path / "a").manifest.step == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not look")
def test_checkpoints_that_may_not_be_looked_at_are_no_reason_to_start_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of somebody else in a folder for all: a fresh start would in time replace what they saved."""
    import forge_ckpt.checkpointer as module

    run(tmp_path, steps=2)
    let_in(tmp_path)
    folder = tmp_path / "a/checkpoints"
    folder.chmod(0o777)
    for name in ("step_00000001", "step_00000002"):
        (folder / name).chmod(0o700)
    choose = module.choose

    def as_another(*arguments: Any) -> Any:
        with as_nobody():
            return choose(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "choose", as_another)
        with pytest.raises(CheckpointError, match="none of the checkpoints"):
            run(tmp_path, steps=4)
    assert "step_00000002/manifest.json cannot be read: Permission denied" in capsys.readouterr().err
    assert len(run(tmp_path, steps=4).losses) == 2


def test_old_ones_that_cannot_be_looked_for_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new one is there by then, so that no save has failed."""
    import forge_ckpt.checkpointer

    real = forge_ckpt.checkpointer.complete

    def complete(store: Any) -> Any:
        if store.latest() is not None:
            raise RequestError("cannot use it: Stale file handle")
        return real(store)

    monkeypatch.setattr(forge_ckpt.checkpointer, "complete", complete)
    assert run(tmp_path, steps=2, checkpoint={"keep_last": 1}).status == 0
    assert "cannot look for old checkpoints" in capsys.readouterr().err
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """A file system of 2 MB: the second save does not fit, and the first one stays."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        table = {"interval": 2, "url": str(disk), "mode": "async"}
        model = {"dim": 64, "ffn_hidden_dim": 192}
        with pytest.raises(CheckpointError, match="No space left") as caught:
            run(tmp_path, steps=6, checkpoint=table, model=model)
        assert "earlier checkpoints are as they were; free some space" in caught.value.hint
        found = sorted(p.name for p in (disk / "a").iterdir())
        assert found == ["latest", "step_00000002"]
        assert open_checkpoint(disk / "a").verify() == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("what", ["file", "link", "dangling"])
def test_what_has_the_name_of_a_checkpoint_makes_room(what: str, tmp_path: Path) -> None:
    """Nothing of it stays behind, and what a link points to is not touched."""
    run(tmp_path, steps=2, checkpoint={"interval": 2})
    place, elsewhere = tmp_path / "a/checkpoints/step_00000004", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "notes.txt").touch()
    if what == "file":
        place.touch()
    else:
        place.symlink_to(elsewhere if what == "link" else "nowhere")
    assert run(tmp_path, steps=4, checkpoint={"interval": 2}).status == 0
    assert names(tmp_path) == ["latest", "step_00000002", "step_00000004"]
    assert open_checkpoint(place).verify() == []
    assert (elsewhere / "notes.txt").exists()


def test_a_copy_that_follows_links_is_told_at_the_start(tmp_path: Path) -> None:
    """And not by the first save, which cannot replace a folder by a link."""
    run(tmp_path / "there", steps=2)
    shutil.copytree(tmp_path / "there/a", tmp_path / "a")
    with pytest.raises(RequestError, match="latest is a folder and no link") as caught:
        run(tmp_path, steps=4)
    assert "remove it" in caught.value.hint
    shutil.rmtree(tmp_path / "a/checkpoints/latest")
    assert len(run(tmp_path, steps=4).losses) == 2


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/checkpoints").write_text("")
    assert_one_clear_line(forge(tmp_path), "checkpoints is no folder", status=2)
    assert (tmp_path / "a/checkpoints").is_file()
