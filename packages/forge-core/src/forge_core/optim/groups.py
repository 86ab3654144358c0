"""Parameter groups: every parameter in exactly one, settings by role and by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
from torch import nn

from forge_core.config.tables import GroupConfig, OptimizerConfig
from forge_core.errors import ConfigError, Problem

MATRIX = "matrix"
"""Role of a hidden matrix: (rows, columns), or (rows, ...) where all further dimensions are columns."""
MATRICES = "matrices"
"""Role of a stack of hidden matrices, (..., rows, columns). Decays like "matrix"."""

VECTOR_ROLE, OTHER_ROLE = "bias", "other"


@attrs.define
class _Entry:
    """A distinct parameter with all its names and its role."""

    parameter: nn.Parameter
    names: list[str]
    role: str

    @property
    def kind(self) -> str:
        return self.role if self.role in (MATRIX, MATRICES) and self.parameter.ndim >= 2 else "other"


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    roles: Mapping[str, str],
    config: OptimizerConfig,
    aliases: Mapping[str, Sequence[str]],
    elsewhere: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Groups for an optimizer, one for each combination of settings that occurs, by first appearance.

    Weight decay is off for the roles in `config.no_decay`, also where an entry of `config.groups` replaces
    its value; the last entry that matches a parameter settles both of its settings. A name without a role
    counts as "bias" if the parameter has fewer than two dimensions, else as "other".

    Args:
        named_parameters: global name and parameter of all that ever train, frozen now or not. Tied weights
            are one parameter with the role of its first name; entries may match any of the names.
        roles: role by global name: norm, bias, embedding, head, matrix, matrices or other.
        config: the `[optimizer]` table; an entry of its groups means an alias, a pattern or a module.
        aliases: fnmatch patterns by alias.
        elsewhere: names of parameters that other ranks have, which entries may also match.

    Returns:
        At least one group, without parameters where this rank has none that trains:
        Dicts with `params`, `param_names` (in the same order), `kind` ("matrix", "matrices" or "other"),
        `name` (unique), `lr` and `initial_lr` (`config.lr` times the entry's scale) and `weight_decay`.

    Raises:
        ConfigError: an entry matches nothing; all such entries at once.
    """
    entries = _distinct(named_parameters, roles)
    chosen = _overrides(entries, config.groups, aliases, tuple(elsewhere))
    groups: dict[tuple[str, float, float], dict[str, Any]] = {}
    for entry, override in zip(entries, chosen, strict=True):
        settings = (entry.kind, *_settings(entry, override, config))
        group = groups.setdefault(settings, _empty_group(*settings, config.lr))
        group["params"].append(entry.parameter)
        group["param_names"].append(entry.names[0])
    result = list(groups.values()) or [_empty_group("other", 1.0, 0.0, config.lr)]
    assert sum(len(group["params"]) for group in result) == len(entries)
    return result


def merged(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups without regard to `kind`, for optimizers that treat all alike: fewer, larger kernels."""
    found: dict[tuple[float, float], dict[str, Any]] = {}
    for group in groups:
        settings = (group["initial_lr"], group["weight_decay"])
        if settings not in found:
            name = group["name"].removeprefix(f"{group['kind']}, ")
            found[settings] = {**group, "params": [], "param_names": [], "kind": "any", "name": name}
        found[settings]["params"] += group["params"]
        found[settings]["param_names"] += group["param_names"]
    return list(found.values())


def _distinct(named_parameters: Iterable[tuple[str, nn.Parameter]], roles: Mapping[str, str]) -> list[_Entry]:
    entries: dict[int, _Entry] = {}
    for name, parameter in named_parameters:
        if id(parameter) in entries:
            entries[id(parameter)].names.append(name)
        else:
            role = roles.get(name, VECTOR_ROLE if parameter.ndim < 2 else OTHER_ROLE)
            entries[id(parameter)] = _Entry(parameter, [name], role)
    return list(entries.values())


def _settings(entry: _Entry, override: GroupConfig | None, config: OptimizerConfig) -> tuple[float, float]:
    """Scale of the learning rate, and weight decay."""
    lr_scale, decay = 1.0, config.weight_decay
    if override is not None:
        lr_scale = override.lr_scale
        decay = decay if override.weight_decay is None else override.weight_decay
    role = MATRIX if entry.role == MATRICES else entry.role
    return lr_scale, 0.0 if role in config.no_decay else decay


def _overrides(
    entries: Sequence[_Entry],
    overrides: Sequence[GroupConfig],
    aliases: Mapping[str, Sequence[str]],
    elsewhere: Sequence[str],
) -> list[GroupConfig | None]:
    chosen: list[GroupConfig | None] = [None] * len(entries)
    problems: list[Problem] = []
    for i, override in enumerate(overrides):
        spec = override.modules
        patterns = aliases.get(spec, (spec, f"{spec}.*"))
        hits = [j for j, entry in enumerate(entries) if _matches(entry.names, patterns)]
        for j in hits:
            chosen[j] = override
        if not hits and not _matches(elsewhere, patterns):
            hint = _suggestion(spec, entries, aliases)
            problems.append(
                Problem(f"optimizer.groups.{i}.modules", f"{spec!r} matches no parameter that trains", hint)
            )
    if problems:
        raise ConfigError(problems)
    return chosen


def _matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _suggestion(spec: str, entries: Sequence[_Entry], aliases: Mapping[str, Sequence[str]]) -> str:
    known = [*aliases, *(name for entry in entries for name in entry.names)]
    near = difflib.get_close_matches(spec, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return "aliases: " + (", ".join(sorted(aliases)) or "none")


def _empty_group(kind: str, lr_scale: float, decay: float, lr: float) -> dict[str, Any]:
    name = f"{kind}, decay {decay:g}" + ("" if lr_scale == 1.0 else f", lr x{lr_scale:g}")
    return {
        "params": [],
        "param_names": [],
        "kind": kind,
        "name": name,
        "lr": lr * lr_scale,
        "initial_lr": lr * lr_scale,
        "weight_decay": decay,
    }
