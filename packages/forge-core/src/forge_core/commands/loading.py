"""A configuration with its plugins, as every command needs it. Imports no torch."""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from forge_core.config import Config, load_config
from forge_core.config.recipes import recipe_names
from forge_core.config.suggest import closest
from forge_core.config.tables import ModelConfig, RunConfig, TrainConfig
from forge_core.contract.parts import MeshAxis
from forge_core.distributed.layout import (
    data_ranks,
    fitting_axes,
    mesh_problems,
    needed_processes,
    resolve_axes,
)
from forge_core.errors import ConfigError, PluginError, Problem, UsageError
from forge_core.files import user_path
from forge_core.loop.split import accumulation
from forge_core.plugins import CORE, PluginCatalog, Plugins
from forge_core.plugins.loading import Implementation

FLAG_HELP = "--table.key=value changes a key of the configuration; any number of them."


def config_argument(parser: argparse.ArgumentParser) -> None:
    """The positional CONFIG and a word on flags."""
    parser.add_argument(
        "config",
        nargs="?",
        default="quickstart",
        help="configuration file (TOML) or name of a recipe (forge config recipes); default: quickstart",
    )
    parser.epilog = f"{FLAG_HELP}\n\n{parser.epilog or ''}"


def refuse_misspelt(parser: argparse.ArgumentParser, words: Sequence[str], known: argparse.Namespace) -> None:
    """Refuse an option that is misspelt, and a flag with its value apart, which argparse takes for CONFIG.

    Args:
        parser: of the command. words: its arguments. known: what the parser read.

    Raises:
        UsageError: with the way to write it.
    """
    config = getattr(known, "config", None)
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or name in options:
            continue
        near = closest(name, options) if "." not in name else None
        if near is not None and name[2:] not in PluginCatalog(Plugins()).table_names():
            raise UsageError(f"no option {name}", f"did you mean {near}?")
        if not equals and following and following == config and not _may_be_config(following):
            raise UsageError(f"'{following}' is not a flag", f"write {name}={following}")


def _may_be_config(word: str) -> bool:
    return word.endswith(".toml") or word in recipe_names() or Path(word).exists()


def refuse_stream(source: str) -> None:
    """Refuse a configuration that only the first of several readers gets: the others would train defaults.

    Raises:
        UsageError: a pipe or a terminal.
    """
    with suppress(OSError, ValueError):
        mode = user_path(source).stat().st_mode
        if stat.S_ISFIFO(mode) or (stat.S_ISCHR(mode) and source != os.devnull):
            raise UsageError(f"{source} can be read once, and every process reads it", "write it to a file")


def blocked_plugins() -> list[str]:
    """Names in FORGE_BLOCK, comma-separated: plugins that may not be loaded."""
    return [name for name in os.environ.get("FORGE_BLOCK", "").split(",") if name]


def load(
    source: str | None,
    flags: Sequence[str],
    *,
    world_size: int | None = 1,
    plugins: Plugins | None = None,
    starting: bool = False,
) -> tuple[Config, Plugins]:
    """Read a file or a recipe (None: defaults only), loading the plugins that it names.

    Args:
        source: the file or recipe. flags: laid over it.
        world_size: processes that are to run it; None checks for the fewest that the mesh can run on.
        plugins: those that may be named; None finds the installed ones.
        starting: whether a run is about to start here, so that files that it needs have to be there.

    Raises:
        ConfigError: with every problem found; UsageError: a stray token; PluginError: a plugin asked for is
            broken.
    """
    if world_size is not None and world_size < 1:
        raise UsageError(f"{world_size} is no number of processes", "at least 1")
    plugins = plugins or Plugins(blocked=blocked_plugins())

    def problems(config: Config, _: int) -> Iterator[Problem]:
        plugins.activate(config.plugins)
        world = cache(lambda: fewest_processes(config, plugins) if world_size is None else world_size)
        axes = cache(lambda: _known_axes(config, plugins, world()))

        def contributed(implementation: Implementation) -> Iterator[Problem]:
            given = {"config": config, "world_size": world(), "axes": axes()}
            for found in plugins.contributions(implementation, **given):
                if starting or not found.value.at_start:
                    yield found.value

        return _one_by_one(
            partial(_choices, config),
            partial(_initial_weights, config, plugins),
            lambda: _split_problems(config, mesh_axes(config, plugins), world()),
            *(partial(contributed, each) for each in plugins.implementations("forge_problems")),
        )

    config = load_config(
        source,
        flags,
        catalog=PluginCatalog(plugins),
        problems=problems,
    )
    if config[RunConfig].strict_plugins:
        broken = plugins.broken()
        if broken:
            raise PluginError(
                "; ".join(str(error) for error in broken.values()), "or set run.strict_plugins = false"
            )
    return config, plugins


def _one_by_one(*asks: Callable[[], Iterable[Problem]]) -> Iterator[Problem]:
    """What each has to say. One that fails keeps no other from being asked: its exception is raised at the
    end, the first one's of several."""
    failed: list[Exception] = []
    for ask in asks:
        try:
            yield from ask()
        except Exception as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _initial_weights(config: Config, plugins: Plugins) -> Iterator[Problem]:
    reads = plugins.implementations("forge_build_initial_weights")
    if config[ModelConfig].init_from is not None and not reads:
        message = "no plugin of this run reads weights from a folder"
        yield Problem("model.init_from", message, "add the table of one that does, or remove the key")


def mesh_axes(config: Config, plugins: Plugins) -> list[MeshAxis]:
    """What the plugins that the configuration names ask for."""
    return [found.value for found in plugins.collect("forge_mesh_axes", config=config)]


def _known_axes(config: Config, plugins: Plugins, world_size: int) -> tuple[MeshAxis, ...]:
    """For plugins that look for problems; none where they cannot be told, which `_split_problems` says."""
    try:
        return fitting_axes(mesh_axes(config, plugins), world_size)
    except Exception:
        return ()


def fewest_processes(config: Config, plugins: Plugins) -> int:
    """The smallest number of processes that the mesh can run on."""
    return needed_processes(mesh_axes(config, plugins))


def _split_problems(config: Config, axes: Sequence[MeshAxis], world_size: int) -> Iterator[Problem]:
    """The mesh must multiply to the number of processes, and the batch to the ranks that read."""
    found = mesh_problems(axes, world_size)
    yield from found
    if not found:
        try:
            accumulation(config[TrainConfig], data_ranks(resolve_axes(axes, world_size)))
        except ConfigError as error:
            yield from error.problems


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
