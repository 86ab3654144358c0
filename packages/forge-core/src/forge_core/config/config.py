"""`Config`: all tables of a run, structured and resolved, each value with its origin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from forge_core.config.layers import find_origin
from forge_core.config.paths import Parts, dotted, lookup
from forge_core.config.structure import Chosen, picked, walk

if TYPE_CHECKING:
    from forge_core.config.catalog import Catalog

T = TypeVar("T")


class Config:
    """The tables of a run, read by class, `config[TrainConfig].seq_len`, or by name, `config.get("train")`.

    Args:
        tables: name of a table -> its instance; the core's first, then plugins' by name.
        options: (dotted path of a table, name of a component it may pick) -> options.
        origins: path of a leaf -> the file or flag it came from, or "derived".
        named: path of a table or array of tables -> the file or flag that named it last.
        core: names of the core's tables.
        catalog: makes default options of components that were neither chosen nor given; not pickled.
    """

    def __init__(
        self,
        tables: Mapping[str, Any],
        *,
        options: Mapping[tuple[str, str], Any] | None = None,
        origins: Mapping[Parts, str] | None = None,
        named: Mapping[Parts, str] | None = None,
        core: tuple[str, ...] = (),
        catalog: Catalog | None = None,
    ) -> None:
        self._tables = dict(tables)
        self._names = {type(table): name for name, table in reversed(self._tables.items())}
        self._options = dict(options or {})
        self._origins = dict(origins or {})
        self._named = dict(named or {})
        self._core = core
        self._catalog = catalog

    def __getitem__(self, cls: type[T]) -> T:
        """The table of this class. KeyError if the configuration does not have it."""
        if cls not in self._names:
            raise KeyError(f"no table of class {cls.__qualname__}: its plugin is not asked for")
        found: T = self._tables[self._names[cls]]
        return found

    def get(self, name: str) -> Any:
        """The table of this name. KeyError if the configuration does not have it."""
        if name not in self._tables:
            raise KeyError(f"no table [{name}] in this configuration")
        return self._tables[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tables

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __eq__(self, other: object) -> bool:
        """Equal tables and options; origins do not count."""
        if not isinstance(other, Config):
            return NotImplemented
        return self._tables == other._tables and self._options == other._options

    __hash__ = None  # type: ignore[assignment]

    @property
    def tables(self) -> Mapping[str, Any]:
        """All tables by name: the core's in their order, then plugins' by name."""
        return MappingProxyType(self._tables)

    @property
    def plugins(self) -> tuple[str, ...]:
        """Names of the plugin tables that are there, sorted."""
        return tuple(sorted(set(self._tables) - set(self._core)))

    def chosen(self, category: str | None = None) -> tuple[Chosen, ...]:
        """The components that tables pick, in the order of tables and keys, of one category or of all."""
        inside = [pair for name, table in self._tables.items() for pair in walk(table, (name,))]
        inside += [pair for at, table in self._option_tables() for pair in walk(table, at)]
        picks = (pick for at, table in inside for pick in picked(table, dotted(at)))
        return tuple(pick for pick in picks if category in (None, pick.category))

    def options(self, path: str, name: str) -> Any | None:
        """Options of component `name` under the table at `path`, e.g. ("optimizer", "muon").

        None if it takes none; defaults where the configuration has none. KeyError if there is no such
        component.
        """
        if (path, name) in self._options:
            return self._options[path, name]
        from forge_core.config.shape import NoKeys, is_table, option_class

        owner = self._at(lookup(path))
        if self._catalog is None or not is_table(type(owner)):
            raise KeyError(f"no options of {name!r} under [{path}]")
        cls = option_class(self._catalog, type(owner), name)
        if cls is None:
            raise KeyError(f"[{path}] picks no component called {name!r}")
        return None if cls is NoKeys else cls()

    def origin(self, path: str) -> str:
        """Where the value at a dotted path came from: a file, a flag, "default" or "derived"."""
        return find_origin(lookup(path), self._origins, self._named)

    def to_toml(self) -> str:
        """All values as TOML, each with its origin as a comment; loading it gives an equal configuration."""
        from forge_core.config.writing import write_config

        return write_config(self)

    def replace(self, **tables: Any) -> Config:
        """A copy with other tables: `config.replace(train=evolve(config[TrainConfig], seed=1))`.

        Nothing is checked or derived again.
        """
        return Config(
            {**self._tables, **tables},
            options=self._options,
            origins=self._origins,
            named=self._named,
            core=self._core,
            catalog=self._catalog,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_catalog": None}

    def __repr__(self) -> str:
        return f"Config({', '.join(self._tables)})"

    def _option_tables(self) -> Iterator[tuple[Parts, Any]]:
        for (path, name), table in self._options.items():
            if table is not None:
                yield (*lookup(path), name), table

    def _at(self, parts: Parts) -> Any:
        """The table, options or value at a path, None where there is nothing."""
        value: Any = self._tables
        for depth, part in enumerate(parts):
            options = self._options.get((dotted(parts[:depth]), part))
            if options is not None:
                value = options
            elif isinstance(value, Mapping):
                value = value.get(part)
            elif isinstance(value, list | tuple):
                value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
            else:
                value = getattr(value, part, None)
        return value
