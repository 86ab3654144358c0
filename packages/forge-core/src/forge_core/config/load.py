"""Loading a configuration: layers, structure, derived values, and all problems in one report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from forge_core.config.paths import lookup
from forge_core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from forge_core.config.catalog import Catalog
    from forge_core.config.config import Config
    from forge_core.config.layers import Layers
    from forge_core.config.structure import TableReader

ProblemsHook = Callable[["Config", int], Iterable[Problem]]


def load_config(
    source: str | Path | None,
    flags: Sequence[str] = (),
    *,
    catalog: Catalog,
    world_size: int = 1,
    problems: ProblemsHook | None = None,
) -> Config:
    """Load a configuration: defaults, then what the file extends, the file, and flags.

    Args:
        source: path of a TOML file, name of a recipe, or None for the defaults.
        flags: `--table.key=value` tokens; of a repeated one the last counts.
        catalog: the tables and components that are installed.
        world_size: number of ranks, handed to `problems`.
        problems: what does not go together across tables; called last, with the resolved configuration.

    Returns:
        All tables, structured and resolved.

    Raises:
        ConfigError: every problem that was found, each with its origin.
        UsageError: a token that is not a flag.
    """
    from forge_core.config.exclusive import drop_replaced
    from forge_core.config.files import read_layers
    from forge_core.config.flags import apply_flags, parse_flags

    parsed = parse_flags(flags)
    layers = read_layers(source)
    found = apply_flags(layers, parsed, catalog)
    drop_replaced(layers, catalog)
    config, reader = _structure(layers, catalog)
    found += reader.problems
    found += _derive(config, reader, found)
    if problems is not None:
        found += _guarded(lambda: problems(config, world_size), found)
    if found:
        raise ConfigError(_report(found, layers))
    return config


def _structure(layers: Layers, catalog: Catalog) -> tuple[Config, TableReader]:
    from forge_core.config.config import Config
    from forge_core.config.structure import TableReader
    from forge_core.config.tables import CORE_TABLES
    from forge_core.config.toplevel import read_tables

    reader = TableReader(catalog)
    tables = read_tables(reader, layers, CORE_TABLES)
    config = Config(
        tables,
        options=reader.options,
        origins=layers.origins,
        named=layers.tables,
        core=tuple(CORE_TABLES),
        catalog=catalog,
    )
    return config, reader


def _derive(config: Config, reader: TableReader, found: Sequence[Problem]) -> list[Problem]:
    """Resolve, and ask every table for its problems: before, and again after if it had none before."""
    from forge_core.config.resolve import places, settle, table_problems

    before = {at: _guarded(lambda at=at: table_problems(config, at), found) for at in places(config)}  # type: ignore[misc]
    new = [problem for inside in before.values() for problem in inside]
    new += _guarded(lambda: settle(config), [*found, *new])
    asked = len(reader.problems)
    for pick in config.chosen():
        if (pick.table, pick.name) not in config._options:
            reader.choose(config._at(lookup(pick.table)), lookup(pick.table))
    config._options.update(
        {key: table for key, table in reader.options.items() if key not in config._options}
    )
    new += reader.problems[asked:]
    for at in places(config):
        if not before.get(at):
            new += _guarded(lambda at=at: table_problems(config, at), [*found, *new])  # type: ignore[misc]
    return new


def _guarded(ask: Callable[[], Iterable[Problem]], found: Sequence[Problem]) -> list[Problem]:
    """All problems; an exception is passed over where problems at hand may have caused it, and what came
    before it is kept."""
    new: list[Problem] = []
    try:
        for problem in ask():
            new.append(problem)
    except Exception:
        if not (found or new):
            raise
    return new


def _report(found: Iterable[Problem], layers: Layers) -> list[Problem]:
    """Each problem once, with its origin (for a file: with the line): files first, by line, then flags."""
    from forge_core.config.lines import line_of

    report: dict[tuple[str, str], Problem] = {}
    places: dict[tuple[str, str], tuple[int, int]] = {}
    files = list(layers.files)
    for problem in found:
        origin, place = problem.origin, (len(files), 0)
        if origin is None:
            parts = lookup(problem.path)
            origin = layers.blame(parts)
            file = layers.files.get(origin)
            line = line_of(file, parts) if file is not None else 0
            place = (files.index(origin) if file is not None else len(files), line)
            origin = f"{origin}:{line}" if line else origin or None
        found_at = (problem.path, problem.message)
        report.setdefault(found_at, attrs.evolve(problem, origin=origin))
        places.setdefault(found_at, place)
    return [report[each] for each in sorted(report, key=places.__getitem__)]
