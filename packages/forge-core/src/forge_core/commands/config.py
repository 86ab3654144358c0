"""`forge config`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import suppress

from forge_core.commands.command import Command
from forge_core.commands.loading import blocked_plugins
from forge_core.config.suggest import did_you_mean, nearest
from forge_core.errors import PluginError, UsageError
from forge_core.plugins import PluginCatalog, Plugins


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", choices=("reference", "schema"), help="Markdown of all keys, or JSON Schema for editors"
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="of the reference; default: all tables")


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    plugins = Plugins(blocked=blocked_plugins())
    catalog = PluginCatalog(plugins)
    if arguments.tables and arguments.what == "schema":
        raise UsageError("a JSON Schema is of all tables", f"leave out {' '.join(arguments.tables)}")
    names = named(catalog, arguments.tables) if arguments.tables else working(catalog)
    if arguments.what == "reference":
        from forge_core.config.reference import reference

        print(reference(catalog, names))
    else:
        from forge_core.config.schema import json_schema

        print(json.dumps(json_schema(catalog, names), indent=2))
    return 0


def named(catalog: PluginCatalog, tables: Sequence[str]) -> list[str]:
    """The tables asked for, each once. Only their plugins are loaded.

    Raises:
        UsageError: there is no such table; PluginError: the plugin of one is broken.
    """
    known = catalog.table_names()
    for table in tables:
        if table not in known:
            near = did_you_mean(nearest(table.partition(".")[0], known))
            raise UsageError(f"no table [{table}]", near or f"tables: {', '.join(known)}")
        catalog.table(table)
    return list(dict.fromkeys(tables))


def working(catalog: PluginCatalog) -> list[str]:
    """All tables but those of broken plugins, of which `forge plugins` says why."""
    names = list(catalog.core_table_names())
    for name in catalog.plugins.names():
        with suppress(PluginError):
            catalog.table(name)
            names.append(name)
    return names


COMMAND = Command(
    description="Print every key of every table (of the core and of installed plugins).",
    examples="examples:\n"
    "  forge config reference > keys.md\n"
    "  forge config reference train optimizer       # of these tables alone\n"
    "  forge config schema > forge.schema.json     # for the TOML support of your editor",
    run=run,
    arguments=arguments,
)
