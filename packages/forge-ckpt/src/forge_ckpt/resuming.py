"""Putting a session into the state of a checkpoint: what is restored, reported and refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import attrs

from forge_ckpt.changes import changes, describe, of_the_model, show
from forge_ckpt.comm import Control
from forge_ckpt.errors import CheckpointError, RefusedError
from forge_ckpt.layout import EXTRAS, rank_file
from forge_ckpt.optimizers import fit, load_optimizers
from forge_ckpt.randomness import set_random_state
from forge_ckpt.reading import SavedCheckpoint, load_into
from forge_ckpt.restoring import Coverage, compare_model, load_model
from forge_ckpt.saving import global_batch
from forge_ckpt.table import CheckpointConfig
from forge_ckpt.tree import join
from forge_core.config.tables import DataConfig, TrainConfig
from forge_core.data.wording import counted
from forge_core.errors import Problem
from forge_core.loop.seeds import derive_seed, seed_process

if TYPE_CHECKING:
    from forge_core.contract import CheckpointExtra
    from forge_core.loop.session import TrainingSession

log = logging.getLogger("forge")
OPTIMIZER = "optimizer.name"


def resume(
    session: TrainingSession, saved: SavedCheckpoint, config: CheckpointConfig, control: Control
) -> int:
    """Restore everything, so that training goes on as if it had never stopped; the step.

    Raises:
        RefusedError: the run would be another one: model, optimizer, seed, global batch or data changed.
    """
    state = saved.state()
    say = control.is_main
    changed = report_changes(session, saved, config, state, say=say)
    refuse_optimizer(session, saved, config, changed)
    compare_model(session, saved)  # before keys: names and shapes are what no flag helps against
    refuse_model(session, saved, config, changed)
    report_coverage(load_model(session, saved), say)
    take_optimizers(session, saved, config, state, changed, say)
    restore_run(session, saved, state)
    load_extras(session, saved, config, say)
    restore_random(session, saved, state)
    step: int = state["step"]
    return step


def start_from(
    session: TrainingSession, saved: SavedCheckpoint, config: CheckpointConfig, control: Control
) -> int:
    """Take from another checkpoint what `[checkpoint]` says; the step to go on from, 0 with a part of it."""
    if not config.takes_part and config.optimizer:
        return resume(session, saved, config, control)
    matches = None
    if config.include or config.exclude:

        def matches(name: str) -> bool:
            taken = not config.include or any(fnmatchcase(name, p) for p in config.include)
            return taken and not any(fnmatchcase(name, p) for p in config.exclude)

    if not config.takes_part:
        state = saved.state()
        changed = report_changes(session, saved, config, state, say=control.is_main)
        compare_model(session, saved)
        refuse_model(session, saved, config, changed)
    coverage = load_model(session, saved, matches, config.partial)
    if not coverage.loaded:
        raise CheckpointError(f"{saved.where} has none of the parameters asked for")
    report_coverage(coverage, control.is_main, always=True)
    if config.takes_part:
        return 0
    restore_run(session, saved, state)
    load_extras(session, saved, config, control.is_main)
    restore_random(session, saved, state)
    return int(state["step"])


def report_changes(
    session: TrainingSession,
    saved: SavedCheckpoint,
    config: CheckpointConfig,
    state: Mapping[str, Any],
    *,
    say: bool,
) -> dict[str, tuple[Any, Any]]:
    """Log every key that changed since the checkpoint, and refuse those that make it another run.

    Returns:
        Value before and value now of each of them.

    Raises:
        RefusedError: seed or global batch changed and no flag allows it.
    """
    found = changes(saved.config_text, session.config.to_toml())
    for change in found if say else ():
        log.warning("changed since the checkpoint: %s", describe(change))
    problems = []
    seed = next((c for c in found if c[0] == "train.seed"), None)
    if seed is not None and "seed" not in config.allow_changed:
        hint = 'restore it, or set checkpoint.allow_changed = ["seed"]'
        problems.append(Problem("train.seed", f"was {seed[1]} in {saved.where}, is {seed[2]}", hint))
    before, now = state["global_batch"], global_batch(session)
    if before != now and not session.config[DataConfig].allow_changed:
        text = f"an update took {counted(before, 'sequence')} in {saved.where}, it takes {now} now"
        hint = f"set it to {before} for as many on any number of ranks, or data.allow_changed = true"
        problems.append(Problem("train.global_batch_size", text, hint))
    if problems:
        raise RefusedError(problems)
    return {path: (before, now) for path, before, now in found}


def refuse_optimizer(
    session: TrainingSession,
    saved: SavedCheckpoint,
    config: CheckpointConfig,
    changed: Mapping[str, tuple[Any, Any]],
) -> None:
    """Raise RefusedError where state of another optimizer would be dropped and no flag allows it."""
    if OPTIMIZER not in changed or "optimizer" in config.allow_changed:
        return
    before, now = changed[OPTIMIZER]
    text = f"was {before} in {saved.where}, is {now}: {fit(session, saved)}"
    hint = 'restore it, or set checkpoint.allow_changed = ["optimizer"]'
    raise RefusedError([Problem(OPTIMIZER, text, hint)])


def refuse_model(
    session: TrainingSession,
    saved: SavedCheckpoint,
    config: CheckpointConfig,
    changed: Mapping[str, tuple[Any, Any]],
) -> None:
    """Raise RefusedError where weights fit and the model computes something else, unless a flag allows it.

    The optimizer's state and the place in the schedule would be those of another model.
    """
    if "model" in config.allow_changed:
        return
    hint = (
        'restore it, or set checkpoint.allow_changed = ["model"]; a new run takes the weights alone with '
        "checkpoint.start_from and checkpoint.weights_only"
    )
    found = of_the_model(((path, *values) for path, values in changed.items()), session.config)
    problems = [
        Problem(path, f"was {show(before)} in {saved.where}, is {show(now)}") for path, before, now in found
    ]
    if problems:
        raise RefusedError([*problems[:-1], attrs.evolve(problems[-1], hint=hint)])


def report_coverage(coverage: Coverage, say: bool, always: bool = False) -> None:
    """Log what was loaded where it is not everything, and the first dtype that changed."""
    if say and (always or coverage.kept or coverage.unused):
        log.warning("from the checkpoint: %s", coverage)
    for name, (before, now) in list(coverage.converted.items())[:1] if say else ():
        tensors = counted(len(coverage.converted), "tensor")
        log.warning("another type of %s: %s was saved as %s and is %s here", tensors, name, before, now)


def take_optimizers(
    session: TrainingSession,
    saved: SavedCheckpoint,
    config: CheckpointConfig,
    state: Mapping[str, Any],
    changed: Mapping[str, tuple[Any, Any]],
    say: bool,
) -> None:
    """Load optimizer state and log what is dropped, and what differs from what is configured."""
    lenient = "optimizer" in config.allow_changed
    groups = state["optimizers"]
    told = any(path.startswith("optimizer.") for path in changed)
    for notice in load_optimizers(
        session, saved, groups, changed=OPTIMIZER in changed, lenient=lenient, told=told
    ):
        if say:
            log.warning("%s", notice)


def restore_run(session: TrainingSession, saved: SavedCheckpoint, state: Mapping[str, Any]) -> None:
    """Counters, data position and guard.

    Raises:
        DataError: the data changed.
    """
    tensors = saved.tensors(rank_file("state", 0))
    session.stream.load_state_dict(join(state["data"], tensors))
    session.guard.load_state_dict(join(state["guard"], tensors))
    session.tokens_seen = state["tokens_seen"]


def restore_random(session: TrainingSession, saved: SavedCheckpoint, state: Mapping[str, Any]) -> None:
    """This rank's generators; on another number of ranks each is seeded anew from seed, step and rank."""
    ranks = session.ranks
    if saved.manifest.world_size != ranks.world_size:
        seed = session.config[TrainConfig].seed
        seed_process(derive_seed(seed, "resumed", state["step"]), session.mesh)
        return
    tree = saved.state(f"state_{ranks.rank:05d}.json")
    set_random_state(join(tree["random"], saved.tensors(rank_file("state", ranks.rank))), session.device)


def load_extras(
    session: TrainingSession, saved: SavedCheckpoint, config: CheckpointConfig, say: bool
) -> None:
    """State of plugins, each under its own rule.

    Raises:
        RefusedError: a plugin cannot take what was saved, with its own words; or it is missing, or newer.
    """
    problems: list[Problem] = []
    loads = []
    there: dict[str, list[str]] = saved.state()["extras"]
    for plugin, extras in session.checkpoint_extras.items():
        for extra in extras:
            if extra.name not in there.get(plugin, ()):
                text = f"{saved.where} has no state {extra.name!r} of plugin {plugin}"
                problems.append(Problem(plugin, text, ALLOW))
                continue
            version, value = read_extra(session, saved, plugin, extra)
            reason = incompatible(extra, version, value)
            if reason:
                problems.append(Problem(plugin, f"state {extra.name!r} cannot be loaded: {reason}", ALLOW))
            else:
                loads.append((extra, value))
    if problems and "extras" not in config.allow_changed:
        raise RefusedError(problems)
    for problem in problems if say else ():
        log.warning("%s; it starts afresh", problem.message)
    here = {(plugin, e.name) for plugin, extras in session.checkpoint_extras.items() for e in extras}
    for plugin, names in there.items():
        for name in names:
            if (plugin, name) not in here and say:
                log.warning(
                    "state %r of plugin %s is in the checkpoint, and nobody here takes it", name, plugin
                )
    for extra, value in loads:
        extra.load_state_dict(value)


ALLOW = 'set checkpoint.allow_changed = ["extras"] to go on without it'


def incompatible(extra: CheckpointExtra, version: int, value: Mapping[str, Any]) -> str:
    """Why a saved state cannot be loaded, "" if it can: the plugin's rule, or that it is newer."""
    if extra.compatible is not None:
        return extra.compatible(version, value)
    return f"it has version {version}, this plugin reads {extra.version}" if version > extra.version else ""


def read_extra(
    session: TrainingSession, saved: SavedCheckpoint, plugin: str, extra: CheckpointExtra
) -> tuple[int, Any]:
    """(version, tree) of a plugin's saved state; sharded tensors laid out as they are now."""
    path = f"{EXTRAS}/{plugin}/{extra.name}"
    entry = saved.state(f"{path}.json")
    if extra.scope == "rank":
        rank = min(session.ranks.rank, saved.manifest.world_size - 1)
        tree = saved.state(f"state_{rank:05d}.json")["extras"].get(plugin, {}).get(extra.name)
        return entry["version"], join(tree, saved.tensors(rank_file("state", rank)))
    if extra.scope == "sharded":
        prefix = f"{EXTRAS}/{plugin}/{extra.name}"
        now = _named_tensors(extra.state_dict(), prefix)
        targets = {n: t.detach().clone() for n, t in now.items() if n in saved.index.tensors}
        load_into(saved, targets)
        missing = {f"{prefix}/{n}" for n in saved.index.names(f"{prefix}/")} - set(targets)
        targets |= {name: saved.tensor(name).clone() for name in missing}
        return entry["version"], join(entry["state"], targets)
    file = f"{path}.safetensors"
    tensors = saved.tensors(file) if file in saved.manifest.files else {}
    return entry["version"], join(entry["state"], {key: t.clone() for key, t in tensors.items()})


def _named_tensors(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    from forge_ckpt.tree import split

    return split(tree, prefix)[1]
