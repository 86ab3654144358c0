"""The `forge` command: finds the subcommand, runs it, and turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import NoReturn

from forge_core.commands.command import Command
from forge_core.errors import ConfigError, ForgeError, UsageError
from forge_core.launch.worker import place, tell
from forge_core.version import __version__

GROUP = "forge.commands"
EACH = "\nerror: "
"""What begins each problem but the first."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COMMANDS = {
    "train": "train a model from a configuration file or a recipe",
    "launch": "make or submit a job of a batch system",
    "check": "say everything that is wrong with a configuration",
    "explain": "print the plan of a run: plugins, order, model, schedule",
    "plugins": "list installed plugins, their hooks and tables",
    "config": "print the reference of all keys, their JSON Schema, or the recipes there are",
    "data": "encode data for training, and look at it",
    "new": "start a plugin package from the template",
    "report": "write an HTML page with the curves of runs",
    "doctor": "look at this machine and the installed packages",
}


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run a command line; the exit status, which tells as well whether all that was printed got out."""
    try:
        status = answer(argv)
    except SystemExit as stop:  # of argparse, after a help text
        raise SystemExit(settled(int(stop.code or 0))) from None
    return settled(status)


def answer(argv: Sequence[str]) -> int:
    """Run a command line; the exit status."""
    words = list(argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        if not words or words[0] in ("-h", "--help"):
            print(overview())
            return 0 if words else 2
        if words[0] == "--version":
            print(f"forge {__version__}")
            return 0
        return dispatch(words[0], words[1:])
    except BrokenPipeError:
        # the reader (head, a pager) has had enough; keep the interpreter from flushing into it at exit
        sys.stdout = None
        return 0
    except KeyboardInterrupt:
        if debug:
            raise
        return interrupted()
    except Exception as error:
        if isinstance(error, OSError) and not debug and settled(0):
            return 1
        status = error.exit_status if isinstance(error, ForgeError) else 1
        shown = tell(error, status, error_text(error))
        if debug:
            raise
        if not shown:
            text = error_text(error).replace(EACH, f"{EACH}{place()}")
            print(f"error: {place()}{text}", file=sys.stderr)
        return status


def settled(status: int) -> int:
    """Print what is still held back; `status`, or 1 after one line where standard output takes no more."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = None
    except OSError as error:
        sys.stdout = None  # as above: the interpreter would try, and fail, once more
        print(f"error: {place()}standard output cannot be written: {error.strerror}", file=sys.stderr)
        return status or 1
    return status


def interrupted() -> int:
    """Say, once for all ranks, that Ctrl-C ended the command before there was anything to save; the exit
    status.
    """
    if os.environ.get("RANK", "0") == "0":
        print(f"stopped by {signal.SIGINT.name}", file=sys.stderr)
    return 128 + signal.SIGINT


def error_text(error: BaseException) -> str:
    """One clear line (one for each problem of a configuration), the plugin it came from, the way out."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("raised by plugin")]
    if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
        # an unbuffered standard output keeps nothing back that would tell it from a file
        return "\n  ".join([f"standard output or a file cannot be written: {error.strerror}", *notes])
    if isinstance(error, ConfigError):
        text = EACH.join(str(problem) for problem in error.problems)
    else:
        text = str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
    if not isinstance(error, ForgeError):
        notes.append("hint: run the same command with --debug for the traceback")
    return "\n  ".join([text, *notes])


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all others."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse. Raises UsageError."""
        raise UsageError(message, f"see {self.prog} --help")


def dispatch(name: str, arguments: list[str]) -> int:
    """Run command `name`.

    Raises:
        UsageError: no such command.
    """
    command = find(name)
    parser = Parser(
        prog=f"forge {name}",
        description=command.description,
        epilog=command.examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.arguments(parser)
    if command.takes_flags:
        known, flags = parse_flagged(parser, arguments)
        if flags:
            from forge_core.commands.loading import refuse_misspelt

            refuse_misspelt(parser, arguments, known)
        return command.run(known, flags)
    return command.run(parser.parse_args(arguments), [])


def parse_flagged(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """What the parser knows, and the flags `--table.key=value` in their order.

    A value may hold spaces, and then argparse takes its flag for CONFIG: while it reads, they are NULs, which
    no command line has. Options of a command have no dot in their name.
    """
    hidden = [
        word.replace(" ", "\0") if word.startswith("--") and "." in word.partition("=")[0] else word
        for word in words
    ]
    known, flags = parser.parse_known_args(hidden)
    return known, [flag.replace("\0", " ") for flag in flags]


def find(name: str) -> Command:
    """The command called `name`, the core's or a plugin's."""
    if name in COMMANDS:
        found: Command = importlib.import_module(f"forge_core.commands.{name}").COMMAND
        return found
    points = {point.name: point for point in plugin_commands()}
    if name in points:
        loaded: Command = points[name].load()
        return loaded
    from forge_core.config.suggest import closest

    near = closest(name, [*COMMANDS, *points])
    raise UsageError(f"no command {name!r}", f"did you mean {near!r}?" if near else "see forge --help")


def plugin_commands() -> list[EntryPoint]:
    """Commands that installed packages bring, by name."""
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def overview() -> str:
    """What `forge --help` prints."""
    lines = [
        "usage: forge COMMAND [...]",
        "",
        "A training system that grows by pip install.",
        "",
        "commands:",
    ]
    lines += [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    extra = [p for p in plugin_commands() if p.name not in COMMANDS]
    if extra:
        lines += ["", "commands of installed packages:"]
        lines += [
            f"  {point.name:<10} from {point.dist.name if point.dist else point.value}" for point in extra
        ]
    lines += [
        "",
        "examples:",
        "  forge train                                  the quickstart: a small model on real text",
        "  forge train my.toml --optimizer.lr=1e-4      a configuration of yours, one key changed",
        "  forge check my.toml                          all its problems, before anything is built",
        "",
        "forge COMMAND --help says more; --debug shows tracebacks; --version prints the version.",
    ]
    return "\n".join(lines)
