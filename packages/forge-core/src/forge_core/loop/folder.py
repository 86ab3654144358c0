"""The run folder: `run.dir/run.name` with everything a run leaves behind."""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import attrs

from forge_core.errors import ConfigError, ForgeError, Problem
from forge_core.files import replace_file, user_path

if sys.platform != "win32":
    import fcntl

LOCK = ".lock"
TAIL = 1 << 16
"""Bytes at the end of a file in which its last line is looked for."""
PATIENCE = 15.0
"""Seconds; data workers of a run that was killed go a few seconds after it, and hold its claim until then."""


@attrs.frozen(kw_only=True)
class RunFolder:
    """A run's name and folder.

    Attributes:
        name: run.name, or a fresh one.
        path: the folder.
        named: the user named the run, so that it may be gone on with.
        ours: a rank of this run has claimed the folder, and what is in it is this run's.
    """

    name: str
    path: Path
    named: bool
    ours: bool = False

    @classmethod
    def of(cls, directory: str, name: str | None) -> RunFolder:
        """The folder for a run of this name; a fresh name (date, time, four random letters) without one."""
        fresh = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        return cls(name=name or fresh, path=user_path(directory) / (name or fresh), named=name is not None)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def holds_a_run(self) -> bool:
        with suppress(OSError):  # whether it can be used at all is for `create`
            return (self.path / "config.toml").exists()
        return False

    @property
    def last_step(self) -> int | None:
        """The last update that the run wrote down: of its metrics, else where it began; None if neither is
        there.
        """
        for name in ("metrics.jsonl", "data.jsonl"):
            with suppress(OSError):
                with (self.path / name).open("rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
                    lines = file.read().splitlines()
                for line in reversed(lines):
                    with suppress(ValueError, KeyError, TypeError):  # cut short, or not of a step
                        return int(json.loads(line)["step"])
        return None

    def create(self) -> None:
        """Make the folder.

        Raises:
            ConfigError: no folder can be there.
            ForgeError: the disk is full or broken.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"cannot make the run folder {self.path}: {error.strerror}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise ForgeError(message, "free some space, or set run.dir") from error
            raise ConfigError([Problem("run.dir", message, "choose another run.dir or run.name")]) from error
        mine = os.access in os.supports_effective_ids
        if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK, effective_ids=mine):
            message = f"this user may not read and write in the run folder {self.path}"
            raise ConfigError([Problem("run.dir", message, "choose another run.dir or run.name")])

    @contextmanager
    def claim(self, patience: float | None = None) -> Iterator[None]:
        """Keep other processes from training in this folder, which must be there, until the context ends.

        The system ends the claim with the process, however that ends. Where there are no file locks, there is
        none.

        Args:
            patience: seconds to wait for one that is about to end; by default `PATIENCE`.

        Raises:
            ConfigError: another process has it, and still after that time.
        """
        with ExitStack() as stack:
            with suppress(OSError):
                # without a buffer, which a full disk would keep from being closed
                file = stack.enter_context((self.path / LOCK).open("a+b", buffering=0))
                if not _lock(file, PATIENCE if patience is None else patience):
                    file.seek(0)
                    holder = file.read().decode().strip() or "another process"
                    hint = "wait until that run has ended, end it, or choose another name"
                    raise ConfigError([Problem("run.name", f"{self.path} is in use by {holder}", hint)])
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
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


def _lock(file: IO[bytes], patience: float) -> bool:
    """Lock a file, or say after `patience` seconds that another process has it locked."""
    if sys.platform == "win32":
        return True
    last = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > last:
                return False
        time.sleep(0.1)
