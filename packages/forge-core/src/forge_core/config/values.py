"""Values of a table: lists, tuples, dicts, unions, bounds and choices, every problem with its path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from forge_core.config.fields import Key
from forge_core.config.leaves import LeafError, read_leaf, show
from forge_core.config.paths import Parts, dotted
from forge_core.config.shape import describe, element, entry, is_optional, is_table, members, tuple_types
from forge_core.config.suggest import did_you_mean, nearest
from forge_core.errors import Problem

BAD: Final = object()
"""Stands for a value that could not be read; a problem was noted."""

_NONE_WORDS = ("none", "null")


class ValueReader:
    """Converts what TOML holds to what a key is declared as. Problems are collected, never raised."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def fail(self, at: Parts, message: str, hint: str = "") -> Any:
        """Note a problem; returns `BAD`."""
        self.problems.append(Problem(dotted(at), message, hint))
        return BAD

    def read_table(self, cls: type, values: Mapping[str, Any], at: Parts, base: Any = None) -> Any:
        """Structure a table; keys left out come from `base`, or else from the defaults."""
        raise NotImplementedError

    def read_key(self, annotation: Any, key: Key, value: Any, at: Parts, default: Any = None) -> Any:
        """A value of a key, within its bounds and choices, or `BAD`."""
        # TOML has no null; where "none" is a choice or a component it is that
        free = is_optional(annotation) and key.component is None and value not in (key.choices or ())
        if free and isinstance(value, str) and value.lower() in _NONE_WORDS:
            return None
        result = self.read(annotation, value, at, default)
        if result is not BAD and result is not None and not self._check(key, result, at):
            return BAD
        return result

    def read(self, annotation: Any, value: Any, at: Parts, default: Any = None) -> Any:
        """A value of a type, or `BAD`."""
        alternatives = members(annotation)
        if (
            value is False
            and is_optional(annotation)
            and any(map(is_table, alternatives))
            and bool not in alternatives
        ):
            return None
        if len(alternatives) > 1:
            return self._union(annotation, alternatives, value, at)
        only = alternatives[0]
        if only is Any:
            return value
        if is_table(only):
            return self._table(only, value, at, default)
        if (of := element(only)) is not None:
            return self._list(of, value, at)
        if (kinds := tuple_types(only)) is not None:
            return self._tuple(kinds, value, at)
        if (of := entry(only)) is not None:
            return self._dict(of, value, at)
        try:
            return read_leaf(only, value)
        except LeafError as error:
            return self.fail(at, error.message, error.hint)

    def _table(self, cls: type, value: Any, at: Parts, default: Any) -> Any:
        if value is True:
            value = {}
        if value is False:
            return self.fail(at, "this table cannot be turned off")
        if not isinstance(value, Mapping):
            several = isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value)
            hint = f"write [{dotted(at)}], not [[{dotted(at)}]]" if several else f"write [{dotted(at)}]"
            return self.fail(at, f"expected a table, not {show(value)}", hint)
        return self.read_table(cls, value, at, default if isinstance(default, cls) else None)

    def _union(self, annotation: Any, alternatives: tuple[Any, ...], value: Any, at: Parts) -> Any:
        fitting = [kind for kind in alternatives if kind is type(value)]
        fitting += [kind for kind in alternatives if kind not in fitting]
        tables = [kind for kind in alternatives if is_table(kind)]
        if isinstance(value, Mapping) and len(tables) == 1:
            fitting = tables
        for kind in fitting:
            before = len(self.problems)
            result = self.read(kind, value, at)
            if result is not BAD or (fitting is tables and len(self.problems) > before):
                return result
            del self.problems[before:]
        return self.fail(at, f"expected {describe(annotation)}, not {show(value)}")

    def _list(self, of: Any, value: Any, at: Parts) -> Any:
        if not isinstance(value, list):
            table = is_table(of) and isinstance(value, Mapping)
            hint = f"write [[{dotted(at)}]], not [{dotted(at)}]" if table else _in_brackets(of, value)
            return self.fail(at, f"expected {describe(list[of])}, not {show(value)}", hint)
        return self._all([self.read(of, inner, (*at, str(i))) for i, inner in enumerate(value)])

    def _tuple(self, kinds: tuple[Any, ...], value: Any, at: Parts) -> Any:
        if kinds[-1] is ...:
            items = self._list(kinds[0], value, at)
            return items if items is BAD else tuple(items)
        if not isinstance(value, list) or len(value) != len(kinds):
            words = ", ".join(describe(kind) for kind in kinds)
            return self.fail(at, f"expected a list of {len(kinds)} ({words}), not {show(value)}")
        pairs = enumerate(zip(kinds, value, strict=True))
        items = self._all([self.read(kind, inner, (*at, str(i))) for i, (kind, inner) in pairs])
        return items if items is BAD else tuple(items)

    def _dict(self, of: Any, value: Any, at: Parts) -> Any:
        if not isinstance(value, Mapping):
            return self.fail(at, f"expected a table, not {show(value)}", f"write [{dotted(at)}]")
        items = {name: self.read(of, inner, (*at, name)) for name, inner in value.items()}
        return BAD if self._all(list(items.values())) is BAD else items

    @staticmethod
    def _all(items: list[Any]) -> Any:
        return BAD if any(item is BAD for item in items) else items

    def _check(self, key: Key, value: Any, at: Parts) -> bool:
        """Bounds of every number and choices of every item of a value."""
        good = True
        for path, item in _items(value, at):
            if key.choices is not None and item not in key.choices:
                near = (
                    nearest(item, [c for c in key.choices if isinstance(c, str)])
                    if isinstance(item, str)
                    else []
                )
                choices = ", ".join(show(choice) for choice in key.choices)
                self.fail(path, f"must be one of {choices}, not {show(item)}", did_you_mean(near))
                good = False
            elif isinstance(item, int | float) and not isinstance(item, bool) and not within(key, item):
                self.fail(path, f"must be {bounds(key)}, not {show(item)}")
                good = False
        return good


def within(key: Key, number: float) -> bool:
    """Whether a number keeps to the bounds of a key."""
    return (
        (key.ge is None or number >= key.ge)
        and (key.gt is None or number > key.gt)
        and (key.le is None or number <= key.le)
        and (key.lt is None or number < key.lt)
    )


def bounds(key: Key) -> str:
    """The bounds in words, "" without any."""
    limits = ((">=", key.ge), (">", key.gt), ("<=", key.le), ("<", key.lt))
    return " and ".join(f"{sign} {limit}" for sign, limit in limits if limit is not None)


def _items(value: Any, at: Parts) -> Iterator[tuple[Parts, Any]]:
    if isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _items(inner, (*at, str(i)))
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _items(inner, (*at, name))
    else:
        yield at, value


def _in_brackets(of: Any, value: Any) -> str:
    return f"write [{show(value)}]" if of is str and isinstance(value, str) else ""
