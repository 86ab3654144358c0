"""`forge config`."""

from __future__ import annotations

import argparse
import json

from forge_core.commands.command import Command
from forge_core.commands.loading import blocked_plugins
from forge_core.errors import PluginError
from forge_core.plugins import PluginCatalog, Plugins


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", choices=("reference", "schema"), help="Markdown of all keys, or JSON Schema for editors"
    )


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    plugins = Plugins(blocked=blocked_plugins())
    catalog = PluginCatalog(plugins)
    names = list(catalog.core_table_names())
    for name in plugins.names():
        try:
            catalog.table(name)
        except PluginError:
            continue  # a broken plugin takes nothing away from the others; `forge plugins` says why
        names.append(name)
    if arguments.what == "reference":
        from forge_core.config.reference import reference

        print(reference(catalog, names))
    else:
        from forge_core.config.schema import json_schema

        print(json.dumps(json_schema(catalog, names), indent=2))
    return 0


COMMAND = Command(
    description="Print every key of every table (of the core and of installed plugins).",
    examples="examples:\n"
    "  forge config reference > keys.md\n"
    "  forge config schema > forge.schema.json     # for the TOML support of your editor",
    run=run,
    arguments=arguments,
)
