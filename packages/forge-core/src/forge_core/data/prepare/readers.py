"""Which reader reads which kind of input, and which kind a path is."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

from forge_core.data.prepare.job import Input, Job, Kind, Part, Unit
from forge_core.files import user_path

JSONL = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".jsonl.zst", ".json.zst")
PARQUET = (".parquet",)


class Reader(Protocol):
    """A module of this folder."""

    def find(self, sources: Sequence[str], job: Job) -> list[Input]:
        """The inputs, in order."""
        ...

    def cut(self, inputs: Sequence[Input], job: Job, shard_size: int) -> list[Unit]:
        """The units of work, about `shard_size` bytes of input each."""
        ...

    def rows(self, part: Part, job: Job) -> Iterator[tuple[int, Any]]:
        """Number and content of each row: text (str or bytes), or a list of messages.

        Raises:
            DataError: naming file and row.
        """
        ...

    def where(self, path: str, number: int) -> str:
        """A row, in words."""
        ...


def reader_of(kind: Kind) -> Reader:
    """The reader of a kind; imports what it needs."""
    return cast(Reader, importlib.import_module(f"forge_core.data.prepare.{kind}"))


def kind_of(source: str) -> Kind:
    """By name: of a file its suffix, of a folder that of its files. What is nothing else is text.

    So is what cannot be looked into: its reader says why.
    """
    try:
        return _kind_of(source)
    except PermissionError:
        return "text"


def _kind_of(source: str) -> Kind:
    root = user_path(source)
    names = [root.name]
    if root.is_dir():
        if any((root / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
            return "hf"
        names = [path.name for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")]
    for kind, suffixes in (("jsonl", JSONL), ("parquet", PARQUET)):
        if names and all(name.endswith(suffixes) for name in names):
            return cast(Kind, kind)
    return "text"
