"""`[run]`: the run as such: its name, its folder, how it ends, and which plugin settles a clash."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.config.fields import key, table
from forge_core.config.leaves import show
from forge_core.errors import Problem
from forge_core.files import home_problem

LONGEST_NAME = 255
"""Bytes of a name in the file systems there are."""


@table
class RunConfig:
    """The run: name, folder, shutdown, and choices between plugins."""

    name: str | None = key(
        None,
        help="Name of the run; its folder is dir/name. A named run resumes where checkpoints are kept.",
        derived="a fresh name from the date, which never resumes",
    )
    dir: str = key("runs", help="Folder that holds run folders.")
    choose: dict[str, str] = key(
        factory=dict,
        help="Settles a clash: which plugin answers a forge_build_* hook, e.g. step_fn = 'mine'.",
    )
    strict_plugins: bool = key(
        False, help="Refuse to start if any installed plugin is broken, not only one that is asked for."
    )
    deterministic: bool = key(
        False, help="Ask torch for deterministic algorithms (slower; the same bits every time)."
    )
    save_deadline: float = key(
        100.0,
        ge=0,
        unit="s",
        help="After a signal, seconds until the process ends whatever it is doing; 0 waits.",
    )

    def problems(self) -> Iterator[Problem]:
        yield from home_problem("dir", self.dir)
        if self.name is not None and not _is_folder_name(self.name):
            yield Problem(
                "name", f"{show(self.name)} is not a folder name", "letters, digits, '-', '_' and '.'"
            )


def _is_folder_name(name: str) -> bool:
    """Whether a folder can be called so, and a line of output can show it."""
    fits = name.isprintable() and "/" not in name and len(name.encode()) <= LONGEST_NAME
    return bool(name) and fits and name not in {".", ".."}
