"""Tables and components for the configuration layer, from the core and from plugins."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import attrs

from forge_core.config.shape import categories, fields_of
from forge_core.config.suggest import keys_elsewhere
from forge_core.config.tables import CORE_TABLES
from forge_core.contract.parts import Component
from forge_core.errors import ForgeError, PluginError
from forge_core.plugins.registry import Plugins


def load_object(target: str) -> Any:
    """The object a "module:object" string names."""
    module, _, name = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


class PluginCatalog:
    """The `Catalog` of the configuration layer over `Plugins`: asking for a plugin's table loads that
    plugin."""

    def __init__(self, plugins: Plugins) -> None:
        self.plugins = plugins
        self._components: dict[str, dict[tuple[str, str], Component]] = {}

    def core_table_names(self) -> Sequence[str]:
        return tuple(CORE_TABLES)

    def table_names(self) -> Sequence[str]:
        """Core tables, then installed plugins by name. Imports nothing."""
        return (*CORE_TABLES, *self.plugins.names())

    def table(self, name: str) -> type | None:
        """The attrs class of table `name`; loads the plugin. None: the table takes no keys. KeyError: no
        owner."""
        if name in CORE_TABLES:
            return CORE_TABLES[name]
        answer = self.plugins.load(name).call("forge_tables")
        if answer is not None and not (isinstance(answer, type) and attrs.has(answer)):
            raise PluginError(
                f"plugin {name}: forge_tables returned {answer!r}, not a class made with @table"
            )
        return answer

    def components_of(self, plugin: str) -> dict[tuple[str, str], Component]:
        """Components declared by "core" or one plugin, by (category, name)."""
        if plugin not in self._components:
            owners = self.plugins.core if plugin == "core" else (self.plugins.load(plugin),)
            found: dict[tuple[str, str], Component] = {}
            for owner in owners:
                for part in owner.call("forge_components") or ():
                    if (part.category, part.name) in found:
                        other = found[part.category, part.name]
                        raise PluginError(
                            f"plugin {plugin} declares {part.category} {part.name!r} twice: "
                            f"{other.target} and {part.target}"
                        )
                    found[part.category, part.name] = part
            self._components[plugin] = found
        return self._components[plugin]

    def component_names(self, category: str) -> Sequence[str]:
        """Names that a key of this category can take now: bare ones, then `plugin/part` of loaded plugins."""
        owners = self._bare_owners(category)
        bare = [name for owner in owners for c, name in self.components_of(owner) if c == category]
        others = [
            f"{plugin}/{name}"
            for plugin in sorted(set(self.plugins.loaded) - set(owners))
            for c, name in self.components_of(plugin)
            if c == category
        ]
        return (*bare, *others)

    def component(self, category: str, name: str) -> Component:
        """The part called `name`: bare for the core's and those of the table's own plugin, else
        `plugin/part`.

        Raises:
            KeyError: there is none; PluginError: the plugin named before the slash cannot be loaded.
        """
        plugin, slash, part = name.rpartition("/")
        owners = [plugin] if slash else self._bare_owners(category)
        for owner in owners:
            found = self.components_of(owner).get((category, part))
            if found is not None:
                return found
        raise KeyError(name)

    def load(self, category: str, name: str) -> Any:
        """The object that the target of a part names.

        Raises:
            KeyError: there is no such part; PluginError: its target cannot be imported.
        """
        part = self.component(category, name)
        try:
            return load_object(part.target)
        except ForgeError:  # such as that of an extra which is missing, with the way to have it
            raise
        except Exception as error:
            raise PluginError(
                f"{category} {name!r} cannot be imported from {part.target}: {type(error).__name__}: {error}"
            ) from error

    def options(self, component: Component) -> type | None:
        """The attrs class of a component's own options."""
        if component.options is None:
            return None
        try:
            options: type = load_object(component.options)
        except Exception as error:
            raise PluginError(
                f"the options of {component.category} {component.name!r} cannot be imported from "
                f"{component.options}: {type(error).__name__}: {error}"
            ) from error
        return options

    def keys_elsewhere(self, key: str) -> Sequence[str]:
        """Dotted places where tables of the core or of installed plugins have `key` or a similar one.

        For error messages only: it imports plugins, but activates none.
        """
        active = dict(self.plugins.loaded)
        try:
            return keys_elsewhere(self, key)
        finally:
            self.plugins.loaded = active

    def _bare_owners(self, category: str) -> list[str]:
        owners = ["core"]
        for name in sorted(self.plugins.loaded):
            cls = self.table(name)
            if cls is not None and category in all_categories(cls):
                owners.append(name)
        return owners


def all_categories(cls: type) -> set[str]:
    """Component categories that the keys of a table class pick from, nested tables included."""
    found = set(categories(cls).values())
    for field in fields_of(cls).values():
        for inner in field.tables:
            found |= all_categories(inner)
    return found
