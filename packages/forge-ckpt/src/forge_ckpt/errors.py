"""Errors of checkpoints."""

from __future__ import annotations

from forge_core.errors import ConfigError, ForgeError


class CheckpointError(ForgeError):
    """A checkpoint cannot be written or read; names the file and the reason."""


class RequestError(CheckpointError):
    """What the command line or the configuration asks for is not there, or cannot be had."""

    exit_status = 2


class DamagedError(CheckpointError):
    """A checkpoint is incomplete or its bytes are not those that were written.

    Attributes:
        file: the file at fault, relative to the checkpoint.
    """

    def __init__(self, message: str, file: str = "", hint: str = "") -> None:
        super().__init__(message, hint)
        self.file = file


class RemovedError(DamagedError):
    """A checkpoint went while it was read: its run is under way, and keeps its last ones alone."""

    def __init__(self, where: object, file: str = "") -> None:
        hint = "try again, name one that stays, or let the run keep more: checkpoint.keep_last, keep_every"
        super().__init__(f"{where} was removed while it was read", file, hint)


class RefusedError(ConfigError):
    """A checkpoint is whole, but going on from it would be another run."""
