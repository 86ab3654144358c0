"""`forge check`."""

from __future__ import annotations

import argparse

from forge_core.commands.command import Command
from forge_core.commands.loading import config_argument, fewest_processes, load


def arguments(parser: argparse.ArgumentParser) -> None:
    config_argument(parser)
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="number of processes to check for; default: the fewest that the mesh can run on",
    )


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    config, plugins = load(arguments.config, flags, world_size=arguments.world_size, starting=True)
    names = ", ".join(sorted(plugins.loaded)) or "none"
    what, size = arguments.config, arguments.world_size or fewest_processes(config, plugins)
    print(f"ok: {what} can be trained on {size} process{'' if size == 1 else 'es'}; plugins: {names}")
    return 0


COMMAND = Command(
    description="Read a configuration and report every problem in it at once, without building anything.\n"
    "Data is not read: what is wrong inside of it is said when a run, or forge data inspect, opens it.",
    examples="examples:\n  forge check my.toml\n  forge check my.toml --world-size 8 --train.batch_size=4",
    run=run,
    arguments=arguments,
    takes_flags=True,
)
