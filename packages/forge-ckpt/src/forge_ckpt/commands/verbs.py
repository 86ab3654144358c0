"""What the verbs of `forge checkpoint` do; each returns an exit status and what to print."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from forge_ckpt.changes import changes, describe
from forge_ckpt.errors import CheckpointError, DamagedError, RequestError
from forge_ckpt.layout import step_of
from forge_ckpt.reading import SavedCheckpoint, complete, find_store, open_checkpoint
from forge_ckpt.retention import kept
from forge_ckpt.table import CheckpointConfig

SHOWN = 20


def ls(arguments: argparse.Namespace) -> tuple[int, object]:
    """One row a checkpoint."""
    store, only = find_store(arguments.place)
    latest = store.latest()
    rows = []
    for name in store.names() if only is None else [only]:
        row: dict[str, Any] = {"name": name, "step": step_of(name), "latest": name == latest}
        try:
            saved = SavedCheckpoint(store, name)
        except DamagedError as error:
            rows.append({**row, "problem": error.message})
            continue
        problems = saved.problems()
        manifest = saved.manifest
        row |= {"kind": manifest.kind, "bytes": manifest.size, "ranks": manifest.world_size}
        row |= {"saved_at": manifest.saved_at, "metrics": dict(manifest.metrics)}
        rows.append({**row, "problem": problems[0].message if problems else ""})
    if arguments.json:
        return 0, rows
    return 0, "\n".join(_line(row) for row in rows)


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
            found = SavedCheckpoint(store, name).verify()
        except DamagedError as error:
            found = [error]
        bad += bool(found)
        lines += [f"{name}: {error.message}" for error in found] or [f"{name}: whole"]
    return (1 if bad else 0), "\n".join(lines)


def diff(arguments: argparse.Namespace) -> tuple[int, object]:
    """Configuration, then tensors: missing, of another shape or type, and how far values lie apart."""
    one, other = open_checkpoint(arguments.one), open_checkpoint(arguments.other)
    lines = [f"configuration: {describe(change)}" for change in changes(one.config_text, other.config_text)]
    lines += list(_tensor_lines(one, other))
    return (1 if lines else 0), "\n".join(lines) or "no difference"


def _tensor_lines(one: SavedCheckpoint, other: SavedCheckpoint) -> Iterator[str]:
    names = [*one.index.tensors, *(n for n in other.index.tensors if n not in one.index.tensors)]
    different = 0
    for name in names:
        if name not in other.index.tensors:
            yield f"{name}: only in {one.where}"
        elif name not in one.index.tensors:
            yield f"{name}: only in {other.where}"
        else:
            words = _difference(one.tensor(name), other.tensor(name))
            different += bool(words)
            if words and different <= SHOWN:
                yield f"{name}: {words}"
    if different > SHOWN:
        yield f"and {different - SHOWN} more tensors"


def _difference(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape:
        return f"{tuple(one.shape)} and {tuple(other.shape)}"
    if one.dtype != other.dtype:
        return f"{one.dtype} and {other.dtype}"
    if torch.equal(one, other):
        return ""
    largest = (one.double() - other.double()).abs().max()
    count = int((one != other).sum())
    return f"{count} of {one.numel()} values differ, by {float(largest):.3g} at most"


def prune(arguments: argparse.Namespace) -> tuple[int, object]:
    """The rules of `[checkpoint]`, from the command line; what dead saves left behind goes, too."""
    if arguments.keep_last < 1:
        raise RequestError("--keep-last must be at least 1", "to remove a run, remove its folder")
    store, only = find_store(arguments.place)
    if only is not None:
        raise RequestError(f"{arguments.place} is one checkpoint", "give the run folder")
    found = [(saved.name, saved.manifest) for saved in complete(store)]
    if not found:
        raise CheckpointError(f"no checkpoint in {arguments.place} is complete; nothing is removed")
    rules = CheckpointConfig(keep_last=arguments.keep_last, keep_every=arguments.keep_every)
    stay = kept(found, rules, found[0][0]) | {store.latest()}
    gone = sorted({name for name, _ in found} - stay)
    if arguments.dry_run:
        return 0, "\n".join(f"would remove {name}" for name in gone) or "nothing to remove"
    for name in gone:
        store.remove(name)
    return 0, "\n".join(f"removed {name}" for name in [*gone, *store.clean()]) or "nothing to remove"
