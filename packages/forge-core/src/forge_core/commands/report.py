"""`forge report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge_core.commands.command import Command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--out", type=Path, help="the page; default: report.html in the first run folder")


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    from forge_core.metrics.report import write_report

    out = arguments.out or arguments.runs[0] / "report.html"
    write_report(arguments.runs, out)
    print(out)
    return 0


COMMAND = Command(
    description="Write one HTML page, readable offline, with the curves of one or several runs side by side.",
    examples="examples:\n  forge report runs/first\n  forge report runs/first runs/second --out compare.html",
    run=run,
    arguments=arguments,
)
