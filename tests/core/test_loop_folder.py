"""The run folder belongs to one run at a time."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from forge_core.errors import ConfigError, ForgeError, GuardError
from forge_core.launch.local import write_exit
from forge_core.launch.verdict import Ending, explain
from forge_core.loop import folder
from forge_core.testing import isolated_plugins, plugin_object, run_tiny, tiny_config

HOLD = "import fcntl, sys; f = open(sys.argv[1], 'a+'); f.write('process 7 on there'); f.flush(); "
HOLD += "fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "PATIENCE", 0.2)
    config = tiny_config(run={"name": "a"}, train={"max_steps": 1})
    (tmp_path / "a").mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path / "a" / folder.LOCK)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=r"run\.name: .* is in use by process 7 on there"):
            run_tiny(config, folder=tmp_path)
        assert [path.name for path in (tmp_path / "a").iterdir()] == [folder.LOCK]
        other.kill()
    run_tiny(config, folder=tmp_path)
    assert (tmp_path / "a" / "exit.json").exists()


def test_a_run_that_began_meanwhile_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two starts of one name at once find no folder, and the slower one finds the other's when it is
    built."""
    monkeypatch.setattr(folder, "PATIENCE", 0.2)
    other = folder.RunFolder.of(str(tmp_path), "a")
    with ExitStack() as stack:

        def begin() -> list[object]:
            other.create()
            stack.enter_context(other.claim())
            return []

        plugins = isolated_plugins({"mine": plugin_object(forge_observers=begin)})
        config = tiny_config(plugins=plugins, mine=True, run={"name": "a"}, train={"max_steps": 1})
        with pytest.raises(ConfigError, match="is in use by process"):
            run_tiny(config, plugins, folder=tmp_path)
        assert [path.name for path in other.path.iterdir()] == [folder.LOCK]


def test_a_name_that_no_folder_can_have_is_the_users_and_a_full_disk_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"run\.dir: cannot make the run folder .*: File name too long"):
        folder.RunFolder.of(str(tmp_path / ("x" * 300)), "a").create()

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(ForgeError, match="No space left on device") as caught:
        folder.RunFolder.of(str(tmp_path), "a").create()
    assert caught.value.exit_status == 1
    assert caught.value.hint == "free some space, or set run.dir"


def test_a_run_that_ended_holds_nothing(tmp_path: Path) -> None:
    run = folder.RunFolder.of(str(tmp_path), "a")
    run.create()
    with run.claim():
        pass
    with run.claim():
        assert (run.path / folder.LOCK).read_text().startswith("process ")


def test_a_failure_is_written_down_in_one_line_with_its_hint_apart(tmp_path: Path) -> None:
    def fail(step: int, ok: object) -> None:
        if step == 2:
            raise ForgeError("the first line\n  and a second", "do something else")

    plugins = isolated_plugins({"mine": plugin_object(forge_after_updates=lambda: [fail])})
    config = tiny_config(plugins=plugins, mine=True, run={"name": "a"}, train={"max_steps": 3})
    with pytest.raises(ForgeError, match="the first line"):
        run_tiny(config, plugins, folder=tmp_path)
    ended = json.loads((tmp_path / "a" / "exit.json").read_text())
    assert ended["reason"].startswith("the first line; and a second")
    assert "\n" not in ended["reason"]
    assert ended["hint"] == "do something else"
    assert (ended["status"], ended["step"]) == (1, 2)


def test_a_disk_too_full_for_the_end_of_a_run_hides_neither_its_error_nor_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fail(step: int, ok: object) -> None:
        monkeypatch.setattr(folder, "replace_file", full)
        raise GuardError("too many bad steps")

    plugins = isolated_plugins({"mine": plugin_object(forge_after_updates=lambda: [fail])})
    config = tiny_config(plugins=plugins, mine=True, run={"name": "a"}, train={"max_steps": 3})
    with pytest.raises(GuardError, match="too many bad steps"):
        run_tiny(config, plugins, folder=tmp_path)
    assert not (tmp_path / "a" / "exit.json").exists()


def killed_rank(tmp_path: Path) -> dict[str, object]:
    """What the launcher writes of a run whose second rank was killed."""
    ending = Ending(rank=1, code=-9, time=0.0)
    write_exit(tmp_path, 137, explain([ending], None), ending)
    found: dict[str, object] = json.loads((tmp_path / "exit.json").read_text())
    return found


def test_the_launcher_writes_the_last_step_that_is_known(tmp_path: Path) -> None:
    """Of the last whole line of the metrics, else the one that the run began after, else none."""
    assert killed_rank(tmp_path) == {
        "status": 137,
        "reason": "rank 1: killed by SIGKILL",
        "step": None,
        "hint": "the system does that when memory runs out",
        "rank": 1,
    }
    (tmp_path / "exit.json").unlink()
    (tmp_path / "data.jsonl").write_text('{"step": 4, "state": {}}\n')
    assert killed_rank(tmp_path)["step"] == 4
    (tmp_path / "exit.json").unlink()
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "train/loss": 1.0}\n{"step": 6}\n{"ste')
    assert killed_rank(tmp_path)["step"] == 6


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not look")
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_folder_of_another_user_is_refused(mode: int, tmp_path: Path) -> None:
    run = folder.RunFolder.of(str(tmp_path), "a")
    run.create()
    for parent in (tmp_path, *tmp_path.parents):  # pytest's own are for its user alone
        if not parent.stat().st_mode & 0o001:
            parent.chmod(0o755)
    run.path.chmod(mode)
    os.setegid(65534)
    os.seteuid(65534)
    try:
        assert not run.holds_a_run
        with pytest.raises(ConfigError, match=r"run\.dir: this user may not read and write in"):
            run.create()
    finally:
        os.seteuid(0)
        os.setegid(0)
