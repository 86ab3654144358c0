"""`forge config`."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from contextlib import suppress

from forge_core.commands.command import Command
from forge_core.commands.loading import blocked_plugins
from forge_core.config.recipes import describe, recipe_files
from forge_core.config.suggest import did_you_mean, nearest
from forge_core.errors import PluginError, UsageError
from forge_core.plugins import PluginCatalog, Plugins


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("reference", "schema", "recipes"),
        help="Markdown of all keys, JSON Schema for editors, or the recipes of installed packages",
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="of the reference; default: all tables")


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    if arguments.tables and arguments.what != "reference":
        of = "a JSON Schema is of all tables" if arguments.what == "schema" else "recipes have no tables"
        raise UsageError(of, f"leave out {' '.join(arguments.tables)}")
    if arguments.what == "recipes":
        print_recipes()
        return 0
    plugins = Plugins(blocked=blocked_plugins())
    catalog = PluginCatalog(plugins)
    names = named(catalog, arguments.tables) if arguments.tables else working(catalog)
    if arguments.what == "reference":
        from forge_core.config.reference import reference

        print(reference(catalog, names))
    else:
        from forge_core.config.schema import json_schema

        print(json.dumps(json_schema(catalog, names), indent=2))
    return 0


def print_recipes() -> None:
    """Each recipe with what it says of itself, and its file."""
    for name, paths in recipe_files().items():
        print(name)
        for path in paths:
            said = textwrap.fill(describe(path), 100, break_on_hyphens=False, break_long_words=False)
            print(textwrap.indent("\n".join(filter(None, [said, str(path)])), "    "))


def named(catalog: PluginCatalog, tables: Sequence[str]) -> list[str]:
    """The tables asked for, each once. Only their plugins are loaded.

    Raises:
        UsageError: there is no such table; PluginError: the plugin of one is broken.
    """
    from forge_core.config.reference import sections

    known = catalog.table_names()
    for table in tables:
        outer, *inner = table.split(".")
        for owner in {outer, *(part.partition("/")[0] for part in inner)}.intersection(known):
            catalog.table(owner)
        asked, there = outer, list(known)
        if inner and outer in known:
            asked, there = table, [section.name for section in sections(catalog, [outer])]
        if asked not in there:
            near = did_you_mean(nearest(asked, there))
            raise UsageError(f"no table [{table}]", near or f"tables: {', '.join(there)}")
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
    description="Print every key of every table (of the core and of installed plugins), or the recipes that\n"
    "installed packages bring: configurations to train as they are, or to begin a file with\n"
    '(extends = "NAME").',
    examples="examples:\n"
    "  forge config reference > keys.md\n"
    "  forge config reference train optimizer       # of these tables alone\n"
    "  forge config reference data.jsonl            # of a table inside another\n"
    "  forge config schema > forge.schema.json     # for the TOML support of your editor\n"
    "  forge config recipes                         # what forge train NAME and extends may name",
    run=run,
    arguments=arguments,
)
