"""The run folder: `run.dir/run.name` with everything a run leaves behind."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import attrs

from forge_core.errors import ConfigError, ForgeError, Problem
from forge_core.files import replace_file

if sys.platform != "win32":
    import fcntl

LOCK = ".lock"
PATIENCE = 15.0
"""Seconds; data workers of a run that was killed go a few seconds after it, and hold its claim until then."""


@attrs.frozen(kw_only=True)
class RunFolder:
    """A run's name and folder.

    Attributes:
        name: run.name, or a fresh one.
        path: the folder.
        named: the user named the run, so that it may be gone on with.
    """

    name: str
    path: Path
    named: bool

    @classmethod
    def of(cls, directory: str, name: str | None) -> RunFolder:
        """The folder for a run of this name; a fresh name (date, time, four random letters) without one."""
        fresh = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        return cls(name=name or fresh, path=Path(directory) / (name or fresh), named=name is not None)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def holds_a_run(self) -> bool:
        return (self.path / "config.toml").exists()

    def create(self) -> None:
        """Make the folder.

        Raises:
            ConfigError: no folder can be there.
            ForgeError: it cannot be made for another reason, which the system gives.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            message = f"cannot make the run folder {self.path}: {error.strerror}"
            raise ConfigError([Problem("run.dir", message, "choose another run.dir or run.name")]) from error
        except OSError as error:
            raise ForgeError(
                f"cannot make the run folder {self.path}: {error.strerror}",
                "choose another run.dir or run.name",
            ) from error

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Keep other processes from training in this folder, which must be there, until the context ends.

        The system ends the claim with the process, however that ends. Where there are no file locks, there is
        none.

        Raises:
            ConfigError: another process has it, and still after a few seconds, in which dying ones are gone.
        """
        with ExitStack() as stack:
            with suppress(OSError):
                file = stack.enter_context((self.path / LOCK).open("a+", encoding="utf-8"))
                if not _lock(file):
                    file.seek(0)
                    holder = file.read().strip() or "another process"
                    hint = "wait until that run has ended, end it, or choose another name"
                    raise ConfigError([Problem("run.name", f"{self.path} is in use by {holder}", hint)])
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
            yield

    def write_text(self, name: str, text: str) -> None:
        """Write a file whole or not at all."""
        target = self.path / name
        try:
            replace_file(target, text.encode())  # other ranks may write it, too
        except OSError as error:
            raise ForgeError(
                f"cannot write {target}: {error.strerror}", "free some space, or set run.dir"
            ) from error

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self.write_text(name, json.dumps(value, indent=2) + "\n")


def _lock(file: TextIO) -> bool:
    """Lock a file, or say after `PATIENCE` seconds that another process has it locked."""
    if sys.platform == "win32":
        return True
    last = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > last:
                return False
        time.sleep(0.1)
