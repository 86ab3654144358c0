"""What is prepared and how; small enough to be sent to every process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import attrs

from forge_core.data.tokenizer import Tokenizer, fingerprint_of, load_tokenizer
from forge_core.errors import DataError
from forge_core.files import user_path

Kind = Literal["text", "jsonl", "parquet", "hf"]
KINDS: tuple[Kind, ...] = ("text", "jsonl", "parquet", "hf")
SHARD_SIZE = 64 << 20
"""Bytes of input that become one shard, unless told otherwise."""


@attrs.frozen(kw_only=True)
class Job:
    """How documents are read and encoded.

    Attributes:
        kind: of the input. tokenizer: its name. eos_token: that ends a document.
        field: of a row, the text or the messages of a document.
        template: of chats; None for text.
        patterns: names of the files taken from a folder of text.
        hf: further options of Hugging Face data sets.
        cache_dir: for what that library keeps.
        loaded: the tokenizer, where only this process does the work; else it is loaded by its name.
    """

    kind: Kind
    tokenizer: str = "bytes"
    eos_token: str | None = None
    field: str = "text"
    template: str | None = None
    patterns: tuple[str, ...] = ("*",)
    hf: tuple[tuple[str, Any], ...] = ()
    cache_dir: str | None = None
    loaded: Tokenizer | None = attrs.field(default=None, eq=False, repr=False)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded once in a process."""
        return self.loaded or _tokenizer(self.tokenizer, self.eos_token)

    def describe(self) -> dict[str, Any]:
        """All that the tokens depend on but the input."""
        tokenizer = self.load_tokenizer()
        return {
            "kind": self.kind,
            "field": self.field,
            "template": self.template,
            "patterns": list(self.patterns),
            "hf": dict(self.hf),
            "tokenizer": self.tokenizer,
            "tokenizer_fingerprint": fingerprint_of(tokenizer),
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
        }


@lru_cache(maxsize=2)
def _tokenizer(name: str, eos_token: str | None) -> Tokenizer:
    return load_tokenizer(name, eos_token)


@attrs.frozen
class Part:
    """Rows `start` .. `stop - 1` of one input; what they number is the reader's: bytes of a JSONL file, row
    groups of a Parquet file, rows of a data set. `stop` -1: all of it."""

    path: str
    start: int = 0
    stop: int = -1


@attrs.frozen(kw_only=True)
class Input:
    """One input: its name relative to what was given, its size in bytes and its time of change."""

    path: str
    name: str
    size: int
    changed: int


Unit = tuple[Part, ...]
"""What becomes one shard; a function of the inputs and the size of a shard, not of who does the work."""


def gather(parts: Iterable[tuple[Part, int]], most: int) -> list[Unit]:
    """Parts (with their bytes) in their order, put together while they stay within `most` bytes."""
    units: list[Unit] = []
    unit: list[Part] = []
    held = 0
    for part, size in parts:
        if unit and held + size > most:
            units.append(tuple(unit))
            unit, held = [], 0
        unit.append(part)
        held += size
    return [*units, tuple(unit)] if unit else units


def find_inputs(sources: Sequence[str], suffixes: Sequence[str]) -> list[Input]:
    """Files of these suffixes, in the order of the sources and by name in each folder.

    Raises:
        DataError: a source is missing or holds no such file.
    """
    found: list[Input] = []
    for source in sources:
        root = user_path(source)
        if root.is_file():
            found.append(_input(root, root.name))
            continue
        if not root.is_dir():
            raise DataError(f"there is no file or folder {root}")
        files = sorted(
            path
            for path in root.rglob("*")
            if path.name.endswith(tuple(suffixes))
            and path.is_file()
            and not _is_hidden(path.relative_to(root))
        )
        if not files:
            raise DataError(f"{root} holds no file that ends in {', '.join(suffixes)}")
        found += [_input(path, path.relative_to(root).as_posix()) for path in files]
    return found


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _input(path: Path, name: str) -> Input:
    status = path.stat()
    return Input(path=str(path), name=name, size=status.st_size, changed=status.st_mtime_ns)
