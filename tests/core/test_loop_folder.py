"""The run folder belongs to one run at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forge_core.errors import ConfigError
from forge_core.loop import folder
from forge_core.testing import run_tiny, tiny_config

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


def test_a_run_that_ended_holds_nothing(tmp_path: Path) -> None:
    run = folder.RunFolder.of(str(tmp_path), "a")
    run.create()
    with run.claim():
        pass
    with run.claim():
        assert (run.path / folder.LOCK).read_text().startswith("process ")
