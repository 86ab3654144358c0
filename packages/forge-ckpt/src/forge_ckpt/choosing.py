"""What a run goes on from: rank 0 looks at the store and decides, every rank verifies its share of the
bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from forge_ckpt.comm import Control
from forge_ckpt.errors import CheckpointError, DamagedError, RequestError
from forge_ckpt.layout import MANIFEST, step_of
from forge_ckpt.reading import SavedCheckpoint
from forge_ckpt.store import Store
from forge_ckpt.stored import find_store
from forge_ckpt.table import CheckpointConfig

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

log = logging.getLogger("forge")


@attrs.frozen
class Choice:
    """A checkpoint to load; `own` where it is one of this run and training goes on exactly from it."""

    saved: SavedCheckpoint
    own: bool


def choose(
    session: TrainingSession, config: CheckpointConfig, store: Store, control: Control
) -> Choice | None:
    """The checkpoint to load, None for a fresh start. Collective; the same answer on all ranks.

    Implicitly (`auto`) the newest whole one: a damaged one is named and the one before it taken. A path
    that was given is honoured or refused.

    Raises:
        CheckpointError: there is nothing at a path, it is damaged, or all of this run's are.
    """
    if config.resume == "auto" and session.run.named:
        found = newest_whole(store, config, control)
        if found is not None:
            return Choice(found, own=True)
    place = config.start_from if config.resume in ("auto", False) else str(config.resume)
    if place is None:
        return None
    found = named_by(place, config, control)
    return Choice(found, own=False)


def newest_whole(store: Store, config: CheckpointConfig, control: Control) -> SavedCheckpoint | None:
    """The checkpoint saved last that is complete and undamaged, None where there are no checkpoints at all.

    Raises:
        CheckpointError: there are some, but none is whole.
    """
    candidates = iter(_candidates(store)) if control.is_main else iter(())
    tried: list[str] = []
    while True:
        name = control.broadcast(next(candidates, None))
        if name is None:
            break
        problem = _try(store, name, config, control)
        if isinstance(problem, SavedCheckpoint):
            return problem
        tried.append(name)
        if control.is_main:
            log.warning("checkpoint %s is not used: %s", name, problem)
    if tried and not control.broadcast(_only_torn(store)):
        raise CheckpointError(
            f"none of the checkpoints in {store.where(tried[0])} and beside it is whole",
            "set checkpoint.resume = false to start afresh, or name one to start from",
        )
    return None


def _only_torn(store: Store) -> bool:
    """Whether no save was ever completed, so that there is nothing to lose by a fresh start."""
    try:
        return all(store.size(name, MANIFEST) is None for name in store.names())
    except DamagedError:  # one that may not be looked at may be whole
        return False


def _candidates(store: Store) -> Iterator[str]:
    """Names to try: torn ones newer than the last complete one first (to be named), then by time of
    saving.
    """
    order: list[tuple[int, int, str]] = []
    torn: list[str] = []
    for name in store.names():
        try:
            manifest = SavedCheckpoint(store, name).manifest
            order.append((manifest.serial, manifest.step, name))
        except DamagedError:
            torn.append(name)
    order.sort(reverse=True)
    newest = order[0][1] if order else -1
    yield from (name for name in reversed(torn) if (step_of(name) or 0) > newest)
    yield from (name for _, _, name in order)


def _try(store: Store, name: str, config: CheckpointConfig, control: Control) -> SavedCheckpoint | str:
    """The checkpoint if it is whole on all ranks, else what is wrong with it."""
    saved: SavedCheckpoint | None = None
    problem = ""
    try:
        saved = SavedCheckpoint(store, name)
        if control.is_main:
            for error in saved.problems():
                raise error
    except DamagedError as error:
        problem = str(error)
    problems = [text for text in control.gather(problem) if text]
    if problems or saved is None:
        return str(problems[0])
    bad = _verify(saved, control) if config.verify else []
    return bad[0] if bad else saved


def _verify(saved: SavedCheckpoint, control: Control) -> list[str]:
    """What is wrong with the bytes: each rank looks at its share of the files, the largest first."""
    files = sorted(saved.manifest.files, key=lambda path: (-saved.manifest.files[path].size, path))
    errors = saved.verify(files[control.rank :: control.size])
    return [text for found in control.gather([str(error) for error in errors]) for text in found]


def named_by(place: str, config: CheckpointConfig, control: Control) -> SavedCheckpoint:
    """The checkpoint at a path, or the newest whole one of a run folder.

    Raises:
        RequestError: there is none.
        CheckpointError: the one that was named, or each of that run, is not whole.
    """
    answer: dict[str, str | None] = {}
    if control.is_main:
        try:
            answer = {"name": find_store(place)[1]}
        except CheckpointError as error:
            answer = {"error": error.message, "hint": error.hint}
    answer = control.broadcast(answer)
    if "error" in answer:
        key = "start_from" if config.resume in ("auto", False) else "resume"
        raise RequestError(f"checkpoint.{key}: {answer['error']}", answer["hint"] or "")
    store, name = find_store(place)[0], answer["name"]
    if name is None:
        found = newest_whole(store, config, control)
        if found is None:
            raise CheckpointError(f"none of the checkpoints in {place} is complete")
        return found
    result = _try(store, name, config, control)
    if isinstance(result, str):
        raise CheckpointError(result, "name another checkpoint, or the run folder to get the last good one")
    return result
