"""The run folder: `run.dir/run.name` with everything a run leaves behind."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from forge_core.errors import ConfigError, ForgeError, Problem


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

    def write_text(self, name: str, text: str) -> None:
        """Write a file whole or not at all: to a temporary name, then renamed."""
        target = self.path / name
        temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")  # other ranks may write it, too
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise ForgeError(
                f"cannot write {target}: {error.strerror}", "free some space, or set run.dir"
            ) from error

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self.write_text(name, json.dumps(value, indent=2) + "\n")
