"""Errors that a user can act on: one clear line, and where it helps a hint with the way out."""

from __future__ import annotations

from collections.abc import Iterable

import attrs


class ForgeError(Exception):
    """A failure with a message for the user. The command line prints it without a traceback.

    Args:
        message: one line that names the file, table, key or plugin at fault.
        hint: what to do about it, or "".
    """

    exit_status = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UsageError(ForgeError):
    """The command line itself is wrong."""

    exit_status = 2


@attrs.frozen
class Problem:
    """One thing that is wrong with a configuration.

    Attributes:
        path: dotted table and key (`optimizer.lr`), "" for the file as a whole.
        message: what is wrong, in words.
        hint: the way out (a suggestion, the allowed values), or "".
        origin: where the value came from (file or flag); filled in by the configuration layer when None.
        at_start: counts only where a run is about to start, or is checked: a file that is missing here. A
            configuration that is read for another reason (an export, a look at its data) is not refused.
    """

    path: str
    message: str
    hint: str = ""
    origin: str | None = None
    at_start: bool = attrs.field(default=False, kw_only=True)

    def __str__(self) -> str:
        where = f"{self.origin}: " if self.origin else ""
        what = f"{self.path}: " if self.path else ""
        return f"{where}{what}{self.message}" + (f" ({self.hint})" if self.hint else "")


class ConfigError(ForgeError):
    """All problems of one configuration, reported together."""

    exit_status = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class PluginError(ForgeError):
    """A plugin that was asked for cannot be used; names the plugin and the reason."""

    exit_status = 2


class DataError(ForgeError):
    """The data cannot feed the run (empty, too small, unreadable, changed)."""

    exit_status = 2


class WriteError(DataError):
    """Data cannot be written for a reason that no configuration mends: a full or a broken disk."""

    exit_status = 1


class LostProcessError(DataError):
    """A process that reads or prepares data was ended, as the system does where memory runs out."""

    exit_status = 1


class GuardError(ForgeError):
    """The guard gave up: too many bad steps in a row, or `guard.action = "stop"`."""

    exit_status = 3
