"""`forge plugins`."""

from __future__ import annotations

import argparse
import json

from forge_core.commands.command import Command
from forge_core.commands.loading import blocked_plugins
from forge_core.errors import PluginError
from forge_core.plugins import PluginCatalog, Plugins


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def describe(plugins: Plugins) -> list[dict[str, object]]:
    """Every installed plugin: name, package, state ("works", "broken", "blocked"), table, hooks,
    components."""
    catalog = PluginCatalog(plugins)
    rows: list[dict[str, object]] = []
    for candidate in plugins.installed:
        row: dict[str, object] = {
            "name": candidate.name,
            "package": candidate.distribution,
            "version": candidate.version,
            "source": candidate.source,
        }
        rows.append(row)
        if candidate.name in plugins.blocked:
            row |= {"state": "blocked", "reason": "named in FORGE_BLOCK"}
            continue
        try:
            plugin = plugins.load(candidate.name)
            table = catalog.table(candidate.name)
            components = [f"{category} {name}" for category, name in catalog.components_of(candidate.name)]
        except PluginError as error:
            row |= {"state": "broken", "reason": str(error)}
        except Exception as error:
            row |= {"state": "broken", "reason": f"{type(error).__name__}: {error}"}
        else:
            keys = [] if table is None else [a.name for a in table.__attrs_attrs__]  # type: ignore[attr-defined]
            row |= {
                "state": "works",
                "hooks": sorted(plugin.implementations),
                "keys": keys,
                "components": components,
            }
    return rows


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    rows = describe(Plugins(blocked=blocked_plugins()))
    if arguments.json:
        print(json.dumps({"plugins": rows}, indent=2))
        return 0
    if not rows:
        print("no plugins are installed; the core trains the dense text family")
    for row in rows:
        print(f"{row['name']}  {row['package']} {row['version']}  {row['state']}")
        if row["state"] != "works":
            print(f"    {row['reason']}")
            continue
        print(f"    table [{row['name']}]: {', '.join(row['keys']) or 'no keys'}")  # type: ignore[arg-type]
        print(f"    hooks: {', '.join(row['hooks']) or 'none'}")  # type: ignore[arg-type]
        if row["components"]:
            print(f"    components: {', '.join(row['components'])}")  # type: ignore[arg-type]
    return 0


COMMAND = Command(
    description="List installed plugins: which work, which are broken or blocked and why,\n"
    "their tables, hooks and components. A plugin takes part in a run only if the configuration has its\n"
    "table or names a part of it.\n"
    "FORGE_BLOCK=a,b keeps plugins from being loaded.",
    examples="examples:\n  forge plugins\n  forge plugins --json",
    run=run,
    arguments=arguments,
)
