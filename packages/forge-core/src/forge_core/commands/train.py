"""`forge train`."""

from __future__ import annotations

import argparse
import gc

from forge_core.commands.command import Command
from forge_core.commands.loading import config_argument, load


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    # torch brings a million objects that stay: looking through them for garbage, now and in every later
    # collection, takes a tenth of a second each time
    gc.disable()
    from forge_core.loop.ranks import world_size_from_environment

    config, plugins = load(arguments.config, flags, world_size=world_size_from_environment())
    from forge_core.loop.run import train

    gc.freeze()
    gc.enable()
    return train(config, plugins)


COMMAND = Command(
    description="Train a model. Without CONFIG: the recipe quickstart, a small model on real text.\n\n"
    "Exit status: 0 done, 2 configuration, 3 the guard gave up, 75 stopped by a signal with a checkpoint\n"
    "saved, 128 + signal stopped without one, 1 anything else.",
    examples="examples:\n"
    "  forge train\n"
    "  forge train my.toml --run.name=first --train.max_steps=500\n"
    "  forge train quickstart --optimizer.name=muon --optimizer.lr=2e-3",
    run=run,
    arguments=config_argument,
    takes_flags=True,
)
