"""Keeping runs away from checkpoints while they are removed by hand. Imports no torch."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from forge_ckpt.errors import DamagedError, RequestError
from forge_ckpt.store import LocalStore, Store
from forge_ckpt.stored import complete
from forge_core.errors import ConfigError
from forge_core.files import user_path
from forge_core.loop.folder import LOCK, RunFolder

PATIENCE = 1.0
"""Seconds to wait for a run that is about to end."""


@contextmanager
def claimed(store: Store) -> Iterator[None]:
    """Keep a run from starting until the context ends.

    Raises:
        RequestError: a run is using the checkpoints; who it is.
    """
    folder = run_folder(store)
    if folder is None:
        yield
        return
    with ExitStack() as stack:
        try:
            run = RunFolder(name=folder.name, path=folder, named=True)
            stack.enter_context(run.claim(patience=PATIENCE))
        except ConfigError as error:
            hint = "a run removes its own old checkpoints by checkpoint.keep_last; prune when it has ended"
            raise RequestError(f"{error.problems[0].message}: nothing is removed", hint) from error
        yield


def run_folder(store: Store) -> Path | None:
    """The folder of the run that a store belongs to, where it can be found from here and was ever claimed."""
    places = [store.folder.parent] if isinstance(store, LocalStore) else []
    for saved in complete(store)[:1]:
        try:
            table = tomllib.loads(saved.config_text).get("run", {})
        except (DamagedError, ValueError):
            continue
        if table.get("name"):  # checkpoints may lie apart from the run
            places.append(user_path(table.get("dir", "runs")) / table["name"])
    return next((place for place in places if (place / LOCK).exists()), None)
