"""Did you mean: near names in the same table, and the same key in another one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from forge_core.config.paths import Parts, dotted
from forge_core.config.shape import categories, fields_of
from forge_core.errors import PluginError

if TYPE_CHECKING:
    from forge_core.config.catalog import Catalog

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_MOST = 3


def distance(a: str, b: str) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours (Damerau 1964; optimal alignment)."""
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(last[j] + 1, row[-1] + 1, last[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]


def normal(name: str) -> str:
    """A name as keys are spelt: lower case, words joined by underscores."""
    return _CAMEL.sub("_", name.strip()).replace("-", "_").replace(" ", "_").lower()


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """The names that `word` most likely stands for, at most three; empty if none is near.

    Near are: the same up to case and dashes, few typos for the length, or all words of one within the other.
    """
    wanted = normal(word)
    scored: list[tuple[float, str]] = []
    for name in dict.fromkeys(names):
        known = normal(name)
        tail = known.rpartition("/")[2]
        typos = min(distance(wanted, known), distance(wanted, tail))
        if typos <= max(1, min(3, len(wanted) // 3)) and typos < max(len(wanted), len(tail)):
            scored.append((typos, name))
        elif _within(wanted, known):
            scored.append((3.5, name))
    best = min((score for score, _ in scored), default=0.0)
    return [name for score, name in scored if score == best][:_MOST]


def closest(word: str, names: Iterable[str]) -> str | None:
    """The name that `word` most likely stands for, or None."""
    return next(iter(nearest(word, names)), None)


def did_you_mean(names: Sequence[str]) -> str:
    """The suggestion in words, "" without names."""
    if not names:
        return ""
    head = ", ".join(names[:-1])
    return f"did you mean {head} or {names[-1]}?" if head else f"did you mean {names[-1]}?"


def suggest_key(
    catalog: Catalog, at: Parts, key: str, known: Sequence[str], cls: type | None = None
) -> list[str]:
    """What a key that is not in the table at `at` may stand for: keys of that table bare, others dotted.

    A single typo of a longer key of the same table is taken as such; otherwise the same key elsewhere comes
    first (`optimizer.momentum` -> `optimizer.muon.momentum`, or a table of a plugin that has this key).

    Args:
        catalog: what is installed.
        at: path of the table.
        key: the key that is not there.
        known: what may stand in the table.
        cls: class of the table, whose inner tables and component options are searched before other tables.
    """
    own = nearest(key, known)
    if own and len(key) > _MOST and distance(normal(key), normal(own[0])) <= 1:
        return own
    inside = [dotted(place) for place in _keys(catalog, cls, at)] if cls is not None else []
    places = [
        place for place in [*inside, *catalog.keys_elsewhere(key)] if place.rpartition(".")[0] != dotted(at)
    ]
    exact = [place for place in places if normal(place.rpartition(".")[2]) == normal(key)]
    if exact:
        return list(dict.fromkeys([*exact, *own]))[:_MOST]
    return own or [place for place in places if place not in inside][:_MOST]


def keys_elsewhere(catalog: Catalog, key: str, names: Iterable[str] | None = None) -> list[str]:
    """Dotted places of tables and options that have this key, then those with one spelt almost alike.

    Args:
        catalog: what is installed; loads the plugins of the tables that are asked for.
        key: the key looked for.
        names: tables to search, all by default. A broken plugin is passed over.
    """
    places: list[Parts] = []
    for name in catalog.table_names() if names is None else names:
        try:
            cls = catalog.table(name)
        except (KeyError, PluginError):
            continue
        if cls is not None:
            places += _keys(catalog, cls, (name,))
    same = [place for place in places if normal(place[-1]) == normal(key)]
    near = nearest(key, [place[-1] for place in places])
    found = [*same, *(place for place in places if place[-1] in near)]
    return list(dict.fromkeys(map(dotted, found)))[: 2 * _MOST]


def _keys(catalog: Catalog, cls: type, at: Parts, around: tuple[type, ...] = ()) -> Iterator[Parts]:
    """Paths of all keys of a table, of the tables in it and of the options of its components.

    Options that pick from the category they are of (a source made of another) are entered once, not in
    themselves: `around` are those that this table is in.
    """
    for field in fields_of(cls).values():
        here = (*at, field.name)
        yield here
        for inner in field.tables:
            yield from _keys(catalog, inner, here, around)
    for category in dict.fromkeys(categories(cls).values()):
        for name in catalog.component_names(category):
            try:
                options = catalog.options(catalog.component(category, name))
            except (KeyError, PluginError):
                continue
            if options is not None and options not in around:
                yield from _keys(catalog, options, (*at, name), (*around, options))


def _within(a: str, b: str) -> bool:
    """Whether all words of one name are words of the other; words of two letters and more."""
    first, second = ({word for word in name.split("_") if len(word) > 1} for name in (a, b))
    return bool(first and second) and (first <= second or second <= first)
