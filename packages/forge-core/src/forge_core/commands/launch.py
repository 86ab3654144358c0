"""`forge launch`."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge_core.commands.command import Command
from forge_core.commands.loading import FLAG_HELP, blocked_plugins, load, refuse_stream
from forge_core.config import Config, load_config
from forge_core.config.tables import LaunchConfig, RunConfig
from forge_core.files import user_path
from forge_core.plugins import PluginCatalog, Plugins


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("system", choices=["slurm"], help="the batch system")
    parser.add_argument("config", help="configuration file (TOML) or name of a recipe")
    parser.add_argument("--submit", action="store_true", help="submit the job instead of printing its script")
    parser.epilog = f"{FLAG_HELP}\n\n{parser.epilog or ''}"


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    from forge_core.launch.slurm import submit

    script = make_script(arguments.config, flags)
    if arguments.submit:
        print(f"submitted job {submit(script)}")
    else:
        print(script, end="")
    return 0


def make_script(source: str, flags: list[str]) -> str:
    """The batch script of a run, whose configuration is checked for as many ranks as the job will have.

    Raises:
        ConfigError: with every problem found; UsageError: a stray token.
    """
    from forge_core.launch.local import forge_command
    from forge_core.launch.slurm import batch_script

    refuse_stream(source)
    catalog = PluginCatalog(Plugins(blocked=blocked_plugins()))
    launch = load_config(source, flags, catalog=catalog)[LaunchConfig]
    config, _ = load(source, flags, world_size=launch.nodes * (launch.tasks_per_node or 1))
    name = config[RunConfig].name or fresh_name(config)
    named = [] if config[RunConfig].name else [f"--run.name={name}"]
    words = forge_command("train", source, *flags, *named)
    command = [*launch.python, *words[1:]] if launch.python else words
    run_dir = str(user_path(config[RunConfig].dir))
    return batch_script(launch, command, name=name, folder=str(Path.cwd()), run_dir=run_dir)


def fresh_name(config: Config) -> str:
    """A job that is queued again must find its run: it needs a name, whether the user gave one or not."""
    from forge_core.loop.folder import RunFolder

    return RunFolder.of(config[RunConfig].dir, None).name


COMMAND = Command(
    description="Make a job of a batch system from a configuration and its table [launch], and print its\n"
    "script, or submit it. Each rank is a task of its own; the ranks are told to save some time before the\n"
    "limit, and a job that was stopped with a checkpoint saved is queued again.",
    examples="examples:\n"
    "  forge launch slurm run.toml\n"
    "  forge launch slurm run.toml --launch.nodes=4 --launch.time=24:00:00 --submit",
    run=run,
    arguments=arguments,
    takes_flags=True,
)
