"""`forge eval`."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from forge_core.commands.command import Command
from forge_core.errors import UsageError


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", metavar="RUN", help="run, checkpoint, imported or Hugging Face folder")
    parser.add_argument(
        "--sets", type=_words, default=[], metavar="A,B", help="evaluation sets; default: all"
    )
    parser.add_argument("--config", metavar="FILE", help="take data and [eval] from this configuration")
    parser.add_argument(
        "--tasks", type=_words, default=[], metavar="A,B", help="tasks of lm-evaluation-harness instead"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="most samples of a task")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _names_data(flags: list[str]) -> bool:
    return any(
        flag.startswith(("--data.source=", "--data.path=", "--data.mix", "--eval.sets")) for flag in flags
    )


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    from forge_ckpt.hf.opening import open_model
    from forge_ckpt.hf.using import evaluate_sets, using, with_config

    opened = open_model(arguments.place, [] if arguments.config else flags)
    if arguments.config:
        opened = with_config(opened, arguments.config, flags)
    elif opened.kind != "checkpoint" and not arguments.tasks and not _names_data(flags):
        raise UsageError(
            f"{arguments.place} holds weights, and no data to evaluate them on",
            "name a configuration that has some with --config FILE, or give flags such as --data.path=PATH",
        )
    with using(opened, data=not arguments.tasks) as session:
        metrics: dict[str, Any]
        if arguments.tasks:
            from forge_ckpt.hf.harness import evaluate_tasks

            metrics = evaluate_tasks(session, arguments.tasks, limit=arguments.limit)
        else:
            metrics = dict(evaluate_sets(session, arguments.sets))
    if arguments.json:
        # JSON has no NaN
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        print(json.dumps(known, allow_nan=False))
    else:
        for name, value in metrics.items():
            print(f"{name:<40} {value:.6g}" if isinstance(value, float) else f"{name:<40} {value}")
    return 0


COMMAND = Command(
    description="Evaluate the model of a run, a checkpoint, or an imported or Hugging Face folder: loss of\n"
    "the evaluation sets of its configuration (or of another one), or tasks of lm-evaluation-harness.",
    examples="examples:\n"
    "  forge eval runs/mine\n"
    "  forge eval smol --config my.toml --sets wiki,code --json\n"
    "  forge eval smol --tasks arc_easy,hellaswag --limit 100",
    run=run,
    arguments=arguments,
    takes_flags=True,
)
