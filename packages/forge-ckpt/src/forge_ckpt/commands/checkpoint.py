"""`forge checkpoint ls|verify|diff|prune`. Importing it imports no torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from forge_core.commands.command import Command


def arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="ls|verify|diff|prune")
    place = "run folder, folder of checkpoints, one checkpoint, or an address that fsspec knows"
    ls = verbs.add_parser("ls", help="list checkpoints with step, size, kind and what is wrong with them")
    ls.add_argument("place", help=place)
    ls.add_argument("--json", action="store_true", help="print JSON")
    verify = verbs.add_parser("verify", help="compare every byte with the checksums; status 1 if one differs")
    verify.add_argument("place", help=place)
    diff = verbs.add_parser("diff", help="what differs between two checkpoints; status 1 if anything does")
    diff.add_argument("one", help=place)
    diff.add_argument("other", help=place)
    prune = verbs.add_parser("prune", help="remove old checkpoints and what dead saves left behind")
    prune.add_argument("place", help="run folder or folder of checkpoints; no run may be using it")
    prune.add_argument("--keep-last", type=int, default=3, help="how many of the last stay (default: 3)")
    prune.add_argument("--keep-every", type=int, default=0, help="also keep those of every so many updates")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    from forge_ckpt.commands import verbs

    verb: Callable[[argparse.Namespace], tuple[int, object]] = getattr(verbs, arguments.verb)
    status, answer = verb(arguments)
    if isinstance(answer, str):
        print(answer)
    else:
        json.dump(answer, sys.stdout, indent=2)
        print()
    return status


COMMAND = Command(
    description="Look at checkpoints and remove old ones.",
    examples="examples:\n"
    "  forge checkpoint ls runs/mine\n"
    "  forge checkpoint verify runs/mine/checkpoints/step_00001000\n"
    "  forge checkpoint diff runs/mine/checkpoints/step_00001000 runs/other\n"
    "  forge checkpoint prune runs/mine --keep-last 2 --keep-every 1000 --dry-run",
    run=run,
    arguments=arguments,
)
