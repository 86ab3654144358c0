"""What the configuration layer asks of the plugin kernel, and a small one in memory for tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from forge_core.config.shape import fields_of

if TYPE_CHECKING:
    from forge_core.contract.parts import Component


class Catalog(Protocol):
    """The tables and components that are installed."""

    def table_names(self) -> Sequence[str]:
        """Names of the core's tables and of all installed plugins. Imports no plugin."""
        ...

    def table(self, name: str) -> type | None:
        """The attrs class of a table; None for a table without keys. Loads the plugin that owns it.

        Raises KeyError if nobody owns the table and PluginError if its plugin cannot be used.
        """
        ...

    def component_names(self, category: str) -> Sequence[str]:
        """Names that a key of this category may hold, as users write them."""
        ...

    def component(self, category: str, name: str) -> Component:
        """A component by name; `plugin/part` loads that plugin. Raises KeyError or PluginError."""
        ...

    def options(self, component: Component) -> type | None:
        """The attrs class of a component's options, or None if it takes none."""
        ...

    def keys_elsewhere(self, key: str) -> Sequence[str]:
        """Dotted places where installed tables have this key, or one spelt almost alike. Error path only."""
        ...


class StaticCatalog:
    """A catalog of given tables and components; without arguments, of the core's tables.

    Args:
        tables: plugin tables beside the core's; None as class for a table without keys.
        components: what may be picked by name. What the core's tables pick by default is always known.
        options: options class by (category, name).
    """

    def __init__(
        self,
        tables: Mapping[str, type | None] | None = None,
        components: Iterable[Component] = (),
        options: Mapping[tuple[str, str], type] | None = None,
    ) -> None:
        from forge_core.config.tables import CORE_TABLES

        self._tables: dict[str, type | None] = {**CORE_TABLES, **(tables or {})}
        self._options = dict(options or {})
        self._components = {(part.category, part.name): part for part in _defaults(CORE_TABLES.values())}
        self._components |= {(part.category, part.name): part for part in components}

    def table_names(self) -> Sequence[str]:
        return list(self._tables)

    def table(self, name: str) -> type | None:
        return self._tables[name]

    def component_names(self, category: str) -> Sequence[str]:
        return sorted(name for owner, name in self._components if owner == category)

    def component(self, category: str, name: str) -> Component:
        return self._components[category, name]

    def options(self, component: Component) -> type | None:
        return self._options.get((component.category, component.name))

    def keys_elsewhere(self, key: str) -> Sequence[str]:
        from forge_core.config.suggest import keys_elsewhere

        return keys_elsewhere(self, key)


def _defaults(tables: Iterable[type]) -> Iterator[Component]:
    from forge_core.contract.parts import Component

    for cls in tables:
        for field in fields_of(cls).values():
            if field.key.component and isinstance(field.attribute.default, str):
                yield Component(
                    category=field.key.component, name=field.attribute.default, target="none:none"
                )
            for inner in field.tables:
                yield from _defaults([inner])
