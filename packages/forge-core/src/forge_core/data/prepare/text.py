"""Reads files of text, each one document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from forge_core.data.corpus import find_documents, split_documents, unreadable
from forge_core.data.prepare.job import Input, Job, Part, Unit, gather

LIBRARY = "stdlib"
"""Source that stands for the sources of Python's standard library."""


def find(sources: Sequence[str], job: Job) -> list[Input]:
    """Files in the order in which the source `text` has them: by a hash of their names."""
    found = []
    for source in sources:
        documents = find_documents(None if source == LIBRARY else source, job.patterns)
        for document in split_documents(documents, 0.0)[0]:
            changed = document.path.stat().st_mtime_ns
            found.append(
                Input(path=str(document.path), name=document.name, size=document.size, changed=changed)
            )
    return found


def cut(inputs: Sequence[Input], job: Job, shard_size: int) -> list[Unit]:
    return gather(((Part(found.path), found.size) for found in inputs), shard_size)


def rows(part: Part, job: Job) -> Iterator[tuple[int, bytes]]:
    try:
        yield 0, Path(part.path).read_bytes()
    except OSError as error:
        raise unreadable(part.path, error) from error


def where(path: str, number: int) -> str:
    return path
