"""What the verbs of `forge checkpoint` do; each returns an exit status and what to print.

Only `diff` imports torch: the others look at names, sizes and bytes.
"""

from __future__ import annotations

import argparse
from typing import Any

from forge_ckpt.commands.claiming import claimed
from forge_ckpt.errors import CheckpointError, DamagedError, RequestError
from forge_ckpt.layout import step_of
from forge_ckpt.retention import kept
from forge_ckpt.store import Store
from forge_ckpt.stored import StoredCheckpoint, complete, find_store
from forge_ckpt.table import CheckpointConfig


def ls(arguments: argparse.Namespace) -> tuple[int, object]:
    """One row a checkpoint."""
    store, only = find_store(arguments.place)
    latest = store.latest()
    rows = []
    for name in store.names() if only is None else [only]:
        row: dict[str, Any] = {"name": name, "step": step_of(name), "latest": name == latest}
        try:
            saved = StoredCheckpoint(store, name)
            problems = saved.problems()
        except DamagedError as error:
            if not _gone(store, name, only):
                rows.append({**row, "problem": error.message})
            continue
        if problems and _gone(store, name, only):
            continue
        manifest = saved.manifest
        row |= {"kind": manifest.kind, "bytes": manifest.size, "ranks": manifest.world_size}
        row |= {"saved_at": manifest.saved_at, "metrics": dict(manifest.metrics)}
        rows.append({**row, "problem": problems[0].message if problems else ""})
    if arguments.json:
        return 0, rows
    return 0, "\n".join(_line(row) for row in rows)


def _gone(store: Store, name: str, only: str | None) -> bool:
    """Whether one of several was removed since they were listed, by the run that saves there."""
    return only is None and name not in store.names()


def _line(row: dict[str, Any]) -> str:
    mark = " <- latest" if row["latest"] else ""
    if row["problem"]:
        return f"{row['name']}  {row['problem']}{mark}"
    metrics = "".join(f"  {name} {value:.4g}" for name, value in row["metrics"].items())
    size = f"{row['bytes'] / 1e6:,.1f} MB"
    ranks = f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}"
    return f"{row['name']}  {row['kind']:<9}  {size:>12}  {ranks:<8}  {row['saved_at']}{metrics}{mark}"


def verify(arguments: argparse.Namespace) -> tuple[int, object]:
    """Every byte of one checkpoint, or of all of a run."""
    store, only = find_store(arguments.place)
    lines, bad = [], 0
    for name in store.names() if only is None else [only]:
        try:
            found = StoredCheckpoint(store, name).verify(keep=False)
        except DamagedError as error:
            found = [error]
        if found and _gone(store, name, only):
            continue
        bad += bool(found)
        lines += [f"{name}: {error.message}" for error in found] or [f"{name}: whole"]
    return (1 if bad else 0), "\n".join(lines)


def diff(arguments: argparse.Namespace) -> tuple[int, object]:
    """Configuration and tensors."""
    from forge_ckpt.commands.differences import differences
    from forge_ckpt.reading import open_checkpoint

    lines = list(differences(open_checkpoint(arguments.one), open_checkpoint(arguments.other)))
    return (1 if lines else 0), "\n".join(lines) or "no difference"


def prune(arguments: argparse.Namespace) -> tuple[int, object]:
    """The rules of `[checkpoint]`, from the command line; what dead saves left behind goes, too."""
    if arguments.keep_last < 1:
        raise RequestError("--keep-last must be at least 1", "to remove a run, remove its folder")
    if arguments.keep_every < 0:
        raise RequestError("--keep-every must be at least 0", "0 keeps none by its number")
    store, only = find_store(arguments.place)
    if only is not None:
        raise RequestError(f"{arguments.place} is one checkpoint", "give the run folder")
    if arguments.dry_run:
        return 0, "\n".join(f"would remove {name}" for name in _superfluous(store, arguments)) or NOTHING
    with claimed(store):
        superfluous = _superfluous(store, arguments)
        gone = store.clean()
        for name in superfluous:
            try:
                store.remove(name)
            except OSError as error:
                before = f" (removed before: {', '.join(gone)})" if gone else ""
                text = f"cannot remove {store.where(name)}: {error.strerror or error}{before}"
                raise CheckpointError(text, "make the folder writable for this user") from error
            gone.append(name)
    return 0, "\n".join(f"removed {name}" for name in gone) or NOTHING


NOTHING = "nothing to remove"


def _superfluous(store: Store, arguments: argparse.Namespace) -> list[str]:
    found = [(saved.name, saved.manifest) for saved in complete(store)]
    if not found:
        raise CheckpointError(f"no checkpoint in {arguments.place} is complete; nothing is removed")
    rules = CheckpointConfig(keep_last=arguments.keep_last, keep_every=arguments.keep_every)
    stay = kept(found, rules, found[0][0]) | {store.latest()}
    return sorted({name for name, _ in found} - stay)
