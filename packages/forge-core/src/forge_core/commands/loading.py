"""A configuration with its plugins, as every command needs it. Imports no torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence

from forge_core.config import Config, load_config
from forge_core.config.tables import RunConfig
from forge_core.errors import PluginError, Problem
from forge_core.plugins import CORE, PluginCatalog, Plugins

FLAG_HELP = "--table.key=value changes a key of the configuration; any number of them."


def config_argument(parser: argparse.ArgumentParser) -> None:
    """The positional CONFIG and a word on flags."""
    parser.add_argument(
        "config",
        nargs="?",
        default="quickstart",
        help="configuration file (TOML) or name of a recipe; default: quickstart",
    )
    parser.epilog = f"{FLAG_HELP}\n\n{parser.epilog or ''}"


def blocked_plugins() -> list[str]:
    """Names in FORGE_BLOCK, comma-separated: plugins that may not be loaded."""
    return [name for name in os.environ.get("FORGE_BLOCK", "").split(",") if name]


def load(
    source: str | None, flags: Sequence[str], *, world_size: int = 1, plugins: Plugins | None = None
) -> tuple[Config, Plugins]:
    """Read a file or a recipe (None: defaults only), loading the plugins that it names.

    Raises:
        ConfigError: with every problem found; UsageError: a stray token; PluginError: a plugin asked for is
            broken.
    """
    plugins = plugins or Plugins(blocked=blocked_plugins())

    def problems(config: Config, world: int) -> Iterator[Problem]:
        plugins.activate(config.plugins)
        yield from _choices(config)
        for found in plugins.collect("forge_problems", config=config, world_size=world):
            yield found.value

    config = load_config(
        source,
        flags,
        catalog=PluginCatalog(plugins),
        world_size=world_size,
        problems=problems,
    )
    if config[RunConfig].strict_plugins:
        broken = plugins.broken()
        if broken:
            raise PluginError(
                "; ".join(str(error) for error in broken.values()), "or set run.strict_plugins = false"
            )
    return config, plugins


def _choices(config: Config) -> Iterator[Problem]:
    """`[run.choose]` must name hooks that exist and plugins whose tables are there."""
    from forge_core.plugins.loading import specifications

    hooks = sorted(h.removeprefix("forge_build_") for h in specifications() if h.startswith("forge_build_"))
    for hook, plugin in config[RunConfig].choose.items():
        if hook not in hooks:
            yield Problem(f"run.choose.{hook}", "no such choice", f"one of {', '.join(hooks)}")
        if plugin != CORE and plugin not in config.plugins:
            yield Problem(
                f"run.choose.{hook}", f"plugin {plugin!r} is not part of this run", f"add a table [{plugin}]"
            )
