"""`forge data prepare` and `forge data inspect`."""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from forge_core.commands.command import Command
from forge_core.errors import DataError, UsageError

if TYPE_CHECKING:
    from forge_core.data.manifest import Manifest
    from forge_core.data.prepare.job import Job
    from forge_core.data.prepare.run import Progress

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text: str) -> int:
    """Bytes of "64M"."""
    found = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not found or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 64M")
    return int(found[1]) * UNITS[found[2].upper()]


def positive(text: str) -> int:
    """A number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def natural(text: str) -> int:
    """A number of at least 0."""
    return 0 if text == "0" else positive(text)


def arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", metavar="prepare|inspect", required=True)
    prepare = parts.add_parser(
        "prepare",
        help="encode text, JSONL, Parquet or Hugging Face data into shards of tokens",
        description=PREPARE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    prepare.add_argument(
        "sources", nargs="*", metavar="SOURCE", help="files or folders of one kind; 'stdlib' is Python's own"
    )
    prepare.add_argument("--out", required=True, metavar="DIR", help="folder of the shards")
    prepare.add_argument("--tokenizer", default="bytes", help="'bytes', or the path of a tokenizer.json")
    prepare.add_argument("--eos-token", help="token that ends a document (default: the tokenizer's own)")
    prepare.add_argument("--workers", type=positive, default=1, metavar="N", help="processes (default: 1)")
    prepare.add_argument(
        "--format",
        choices=("auto", "text", "jsonl", "parquet", "hf"),
        default="auto",
        help="kind of the sources (default: by their names)",
    )
    prepare.add_argument("--field", help="field or column with the text (default: text) or the messages")
    prepare.add_argument(
        "--chat-template",
        choices=("chatml", "llama3", "plain", "tokenizer"),
        help="the field holds messages; mark the assistant's answers as what is learnt",
    )
    prepare.add_argument("--split", help="split of a Hugging Face data set (default: train)")
    prepare.add_argument(
        "--pattern", action="append", metavar="GLOB", help="files of a folder of text (default: all)"
    )
    prepare.add_argument(
        "--shard-size", type=size, default=size("64M"), metavar="SIZE", help="input of a shard (default: 64M)"
    )
    prepare.add_argument("--verify", action="store_true", help="compare DIR with its manifest, byte by byte")
    prepare.add_argument("--json", action="store_true", help="print one JSON object")
    _inspect_arguments(parts)


def _inspect_arguments(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = parts.add_parser(
        "inspect",
        help="counts, lengths of documents, vocabulary and decoded samples",
        description=INSPECT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    inspect.add_argument("source", metavar="PATH|CONFIG|RUN", help="data, a configuration, or a run's folder")
    inspect.add_argument("--step", type=positive, metavar="N", help="of a run: what its update N saw")
    inspect.add_argument(
        "--samples", type=natural, default=2, metavar="N", help="sequences to show (default: 2)"
    )
    inspect.add_argument(
        "--seq-len", type=positive, metavar="S", help="their length (default: 256, or CONFIG's)"
    )
    inspect.add_argument("--tokenizer", help="of PATH (default: its manifest's, else bytes)")
    inspect.add_argument("--field", help="of PATH: field with the text or the messages")
    inspect.add_argument("--dtype", help="of PATH: type of the ids of a .bin without header")
    inspect.add_argument("--chat-template", help="PATH holds conversations")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    if arguments.part == "prepare":
        if flags:
            raise UsageError(f"forge data prepare takes no {flags[0]}", "see forge data prepare --help")
        try:
            return prepare(arguments)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here", file=sys.stderr)
            return 128 + signal.SIGINT
    module = "data_step" if arguments.step is not None else "data_inspect"
    try:
        status: int = importlib.import_module(f"forge_core.commands.{module}").run(arguments, flags)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG):
            raise
        hint = "make it readable for this user, or name another"
        raise DataError(f"cannot read {arguments.source}: {error.strerror}", hint) from error
    return status


def prepare(arguments: argparse.Namespace) -> int:
    """Encode, or verify what was encoded."""
    from forge_core.data.prepare.run import prepare as encode
    from forge_core.data.prepare.verify import verify

    out = Path(arguments.out)
    if not arguments.sources and not arguments.verify:
        raise UsageError("forge data prepare needs a SOURCE", "a file, a folder, or stdlib")
    if arguments.sources:
        with _bar(arguments.json) as progress:
            manifest = encode(
                arguments.sources,
                _job(arguments),
                out,
                shard_size=arguments.shard_size,
                workers=arguments.workers,
                progress=progress,
            )
    if arguments.verify:
        manifest = verify(out)
    _tell(manifest, out, arguments)
    return 0


def _job(arguments: argparse.Namespace) -> Job:
    from forge_core.data.prepare.job import Job
    from forge_core.data.prepare.readers import kind_of

    kind = arguments.format
    if kind == "auto":
        kinds = {source: kind_of(source) for source in arguments.sources if source != "stdlib"}
        if len(set(kinds.values())) > 1:
            told = ", ".join(f"{source} is {kind}" for source, kind in kinds.items())
            raise UsageError(f"the sources are of several kinds: {told}", "prepare them one by one")
        kind = next(iter(kinds.values()), "text")
    chat = arguments.chat_template
    if chat and kind == "text":
        raise UsageError("--chat-template needs rows with messages", "JSONL, Parquet or Hugging Face data")
    return Job(
        kind=kind,
        tokenizer=arguments.tokenizer,
        eos_token=arguments.eos_token,
        field=arguments.field or ("messages" if chat else "text"),
        template=chat,
        patterns=tuple(arguments.pattern or ("*",)),
        hf=(("split", arguments.split),) if arguments.split else (),
    )


@contextmanager
def _bar(quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on stderr where that is a terminal, else a line every tenth."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(console.file)
        return
    columns = (
        TextColumn("encoding"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} shards, {task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None, tokens=0)
        yield lambda done, total, tokens: bar.update(task, completed=done, total=total, tokens=tokens)


class _Lines:
    """Progress where there is no terminal."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._tenth = file, -1

    def __call__(self, done: int, total: int, tokens: int) -> None:
        tenth = 10 * done // max(1, total)
        if tenth > self._tenth:
            self._tenth = tenth
            print(f"{done}/{total} shards, {tokens:,} tokens", file=self._file, flush=True)


def _tell(manifest: Manifest, out: Path, arguments: argparse.Namespace) -> None:
    from forge_core.data.wording import counted

    if arguments.json:
        numbers = {
            "tokens": manifest.tokens,
            "documents": manifest.documents,
            "max_token": manifest.max_token,
        }
        print(json.dumps({"out": str(out), **numbers, "shards": len(manifest.shards)}))
        return
    checked = "verified: " if arguments.verify else ""
    print(
        f"{checked}{counted(manifest.tokens, 'token')} of {counted(manifest.documents, 'document')} "
        f"in {counted(len(manifest.shards), 'shard')} of {manifest.dtype} in {out}"
    )
    tokenizer = manifest.plan["tokenizer"]
    print(f'train on them: data.source = "tokens", data.path = "{out}", data.tokenizer = "{tokenizer}"')


PREPARE = """\
Encode documents into memory-mapped shards of tokens, with an index of documents and a manifest.
The result is the same for any number of workers. Run the same command again after an interruption:
finished shards are verified and kept."""

INSPECT = """\
Show what a model would see: counts, lengths of documents, how much of the vocabulary occurs, and
decoded sequences with the edges of documents and what is not learnt. --table.key=value changes a CONFIG."""

COMMAND = Command(
    description="Encode data for training, and look at it.",
    examples="""\
examples:
  forge data prepare corpus/ --out tokens/ --tokenizer tokenizer.json --workers 8
  forge data prepare chats.jsonl --chat-template chatml --out tokens/ --tokenizer tokenizer.json
  forge data prepare --out tokens/ --verify
  forge data inspect tokens/
  forge data inspect my.toml --data.packing=best_fit
  forge data inspect runs/mine --step 1000""",
    run=run,
    arguments=arguments,
    takes_flags=True,
)
