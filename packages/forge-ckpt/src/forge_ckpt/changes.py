"""What changed between the run that saved a checkpoint and the one that goes on from it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from forge_core.config.computes import model_keys
from forge_core.config.files import DERIVED_KEYS
from forge_core.config.layers import DERIVED
from forge_core.config.paths import dotted

if TYPE_CHECKING:
    from forge_core.config import Config

Change = tuple[str, Any, Any]
"""Dotted path of a key, its value before and its value now; None for absent."""

QUIET = ("run", "metrics", "profiling", "launch", "checkpoint", DERIVED_KEYS)
"""Tables (and the list of what was derived) that change nothing of what is computed."""
QUIET_KEYS = (
    "data.num_workers",
    "data.prefetch",
    "data.cache_dir",
    "data.allow_changed",
    "distributed.start_timeout",
    "distributed.timeout",
    "distributed.cp_attention",
)
"""Keys of other tables that do not, either."""
AFFECTS: dict[str, str] = {
    "model": "the model",
    "optimizer": "updates from here on",
    "scheduler": "learning rates from here on",
    "train.max_steps": "the length of the run and of its learning rate schedule",
    "train.grad_clip_norm": "updates from here on",
    "train.dtype": "rounding",
    "train.compile": "rounding",
    "train.seed": "random numbers and the order of samples",
    "train": "batches or rounding",
    "data": "which samples come next",
    "loss": "what is minimised",
    "freeze": "which parameters train",
    "guard": "which updates are skipped",
    "eval": "evaluations",
    "distributed": "the layout, and rounding",
}


def flat(tables: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested tables by dotted path."""
    for name, value in tables.items():
        path = f"{at}.{name}" if at else name
        if isinstance(value, Mapping):
            yield from flat(value, path)
        else:
            yield path, value


def changes(before: str, now: str) -> list[Change]:
    """Keys that differ between two configurations in TOML.

    Raises:
        tomllib.TOMLDecodeError: one of them is no TOML.
    """
    old, new = dict(flat(tomllib.loads(before))), dict(flat(tomllib.loads(now)))
    paths = [path for path in (*new, *(p for p in old if p not in new)) if old.get(path) != new.get(path)]
    loud = [path for path in paths if path not in QUIET_KEYS and path.partition(".")[0] not in QUIET]
    return [(path, old.get(path), new.get(path)) for path in loud]


def of_the_model(found: Iterable[Change], config: Config) -> list[Change]:
    """Those of the changes that make it another model, of the same shapes or not.

    A key that was absent had its default, or what is derived from other keys: releases add keys.
    """
    keys = {".".join(parts): (parts, default) for parts, default in model_keys(config).items()}
    other = []
    for path, before, now in found:
        if path not in keys:
            continue
        parts, default = keys[path]
        added = before is None and (now == default or config.origin(dotted(parts)) == DERIVED)
        if not added:
            other.append((path, before, now))
    return other


def describe(change: Change) -> str:
    """A change in words, with what it affects."""
    path, old, new = change
    words = f"{path} was {show(old)}, is {show(new)}"
    for place in (path, path.partition(".")[0]):
        if place in AFFECTS:
            return f"{words} (affects {AFFECTS[place]})"
    return words


def show(value: Any) -> str:
    """A value in words."""
    return "absent" if value is None else repr(value)
