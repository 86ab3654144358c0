"""Values that follow from others once all layers are merged, and what does not go together in a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.config.layers import DERIVED
from forge_core.config.paths import Parts, dotted, lookup
from forge_core.config.shape import fields_of, is_table
from forge_core.config.structure import walk
from forge_core.errors import ConfigError, ForgeError, Problem

if TYPE_CHECKING:
    from forge_core.config.config import Config

_PASSES = 5


def settle(config: Config) -> list[Problem]:
    """Call every table's `resolve` until nothing changes; what changed gets the origin "derived".

    Tables come in their order (core, then plugins by name), then the options of components; inner tables come
    before the table that holds them. A `ForgeError` becomes a problem of its table.

    Raises:
        RuntimeError: values that keep changing (two tables that derive from each other).
    """
    failed: dict[Parts, list[Problem]] = {}
    for _ in range(_PASSES):
        changed = [at for at in places(config) if at not in failed and _settle_one(config, at, failed)]
        if not changed:
            return [problem for problems in failed.values() for problem in problems]
    raise RuntimeError(
        f"derived values of {', '.join(map(dotted, changed))} do not settle: they depend on each other"
    )


def table_problems(config: Config, at: Parts) -> Iterator[Problem]:
    """What the `problems` methods of the table at `at`, and of the tables within it, have to say."""
    for path, table in walk(_get(config, at), at):
        method = _method(table, "problems")
        if method is not None:
            for problem in method() or ():
                full = dotted(path) + ("." + problem.path if problem.path else "")
                yield attrs.evolve(problem, path=full)


def places(config: Config) -> list[Parts]:
    """Paths of all tables and options of a configuration."""
    options = [(*lookup(path), name) for (path, name), table in config._options.items() if table is not None]
    return [(name,) for name in config._tables] + options


def _get(config: Config, at: Parts) -> Any:
    return config._tables[at[0]] if len(at) == 1 else config._options[dotted(at[:-1]), at[-1]]


def _settle_one(config: Config, at: Parts, failed: dict[Parts, list[Problem]]) -> bool:
    """Resolve one table in place. True if it changed."""
    before = _get(config, at)
    try:
        after = _resolved(before, config)
    except ConfigError as error:
        failed[at] = list(error.problems)
        return False
    except ForgeError as error:
        failed[at] = [Problem(dotted(at), error.message, error.hint)]
        return False
    except Exception as error:
        error.add_note(f"while values of [{dotted(at)}] were derived")
        raise
    paths = list(_differences(before, after, at))
    config._origins.update(dict.fromkeys(paths, DERIVED))
    if len(at) == 1:
        config._tables[at[0]] = after
    else:
        config._options[dotted(at[:-1]), at[-1]] = after
    return bool(paths)


def _resolved(table: Any, config: Config) -> Any:
    changes: dict[str, Any] = {}
    for field in fields_of(type(table)).values():
        if field.tables:
            value = getattr(table, field.name)
            changes[field.attribute.alias or field.name] = _resolved_value(value, config)
    if changes:
        table = attrs.evolve(table, **changes)
    method = _method(table, "resolve")
    if method is None:
        return table
    result = method(config)
    if type(result) is not type(table):
        raise TypeError(
            f"{type(table).__qualname__}.resolve must return a {type(table).__qualname__}, not {result!r}"
        )
    return result


def _resolved_value(value: Any, config: Config) -> Any:
    if is_table(type(value)):
        return _resolved(value, config)
    if isinstance(value, list | tuple):
        return type(value)(_resolved_value(inner, config) for inner in value)
    if isinstance(value, Mapping):
        return {name: _resolved_value(inner, config) for name, inner in value.items()}
    return value


def _differences(before: Any, after: Any, at: Parts) -> Iterator[Parts]:
    """Paths of the leaves in which two values differ; a list of another length counts as one leaf."""
    if is_table(type(after)) and type(before) is type(after):
        for name in fields_of(type(after)):
            yield from _differences(getattr(before, name), getattr(after, name), (*at, name))
    elif (
        isinstance(after, list) and isinstance(before, list) and len(before) == len(after) and before != after
    ):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _differences(old, new, (*at, str(i)))
    elif before != after:
        yield at


def _method(table: Any, name: str) -> Any | None:
    """A method of a table, not a key that happens to have its name."""
    return getattr(table, name) if callable(getattr(type(table), name, None)) else None
