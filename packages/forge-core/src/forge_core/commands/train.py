"""`forge train`."""

from __future__ import annotations

import argparse
import gc
import os
import sys

from forge_core.commands.command import Command
from forge_core.commands.loading import config_argument, load, refuse_stream
from forge_core.config.tables import RunConfig
from forge_core.launch.environment import adopt_slurm, restarts
from forge_core.launch.status import settle
from forge_core.launch.worker import attach


def arguments(parser: argparse.ArgumentParser) -> None:
    config_argument(parser)
    parser.add_argument(
        "--nproc", type=int, default=1, metavar="N", help="number of processes on this machine; default: 1"
    )
    parser.add_argument(
        "--master-port", type=int, default=0, metavar="PORT", help="where they meet; default: any free port"
    )


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    return run_several(arguments, flags) if arguments.nproc != 1 else run_here(arguments, flags)


def run_several(arguments: argparse.Namespace, flags: list[str]) -> int:
    """Check the configuration once, then start the processes and watch over them. Imports no torch."""
    from forge_core.launch.local import check_nproc, forge_command, run_local

    check_nproc(arguments.nproc)
    refuse_stream(arguments.config)
    config, _ = load(arguments.config, flags, world_size=arguments.nproc, starting=True)
    debug = ["--debug"] if "--debug" in sys.argv else []
    return run_local(
        forge_command(*debug, "train", arguments.config, *flags),
        arguments.nproc,
        deadline=config[RunConfig].save_deadline,
        port=arguments.master_port,
    )


def run_here(arguments: argparse.Namespace, flags: list[str]) -> int:
    """Train in this process, one of several if a launcher says so."""
    attach()
    adopt_slurm()
    main = os.environ.get("RANK", "0") == "0"
    if main and (count := restarts()):
        print(f"started again by its launcher, restart {count}", flush=True)
    # torch brings a million objects that stay: looking through them for garbage, now and in every later
    # collection, takes a tenth of a second each time
    gc.disable()
    from forge_core.loop.ranks import world_size_from_environment

    world = world_size_from_environment()
    if world > 1:
        refuse_stream(arguments.config)
    config, plugins = load(arguments.config, flags, world_size=world, starting=True)
    from forge_core.loop.run import train

    gc.freeze()
    gc.enable()
    return settle(train(config, plugins), main=main)


COMMAND = Command(
    description="Train a model. Without CONFIG: the recipe quickstart, a small model on real text.\n\n"
    "Exit status: 0 done, 2 configuration, 3 the guard gave up, 75 stopped by a signal with a checkpoint\n"
    "saved, 128 + signal stopped without one, 1 anything else.",
    examples="examples:\n"
    "  forge train\n"
    "  forge train my.toml --run.name=first --train.max_steps=500\n"
    "  forge train quickstart --optimizer.name=muon --optimizer.lr=2e-3\n"
    "  forge train my.toml --nproc 2",
    run=run,
    arguments=arguments,
    takes_flags=True,
)
