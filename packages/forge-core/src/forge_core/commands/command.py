"""What a command is. Packages add commands by entry points of group `forge.commands` that name a
`Command`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import attrs


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """A command without arguments."""


@attrs.frozen(kw_only=True)
class Command:
    """One subcommand of `forge`.

    Attributes:
        description: what it does, for `--help`.
        examples: shown at the end of `--help`.
        run: `run(arguments, flags) -> exit status`; imports what it needs, so that `forge --help` stays
            quick.
        arguments: adds arguments to its parser.
        takes_flags: leaves `--table.key=value` tokens to `run` as flags.
    """

    description: str
    examples: str
    run: Callable[[argparse.Namespace, list[str]], int]
    arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments
    takes_flags: bool = False
