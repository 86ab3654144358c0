"""Small sources for the tests of data: specifications, documents and files of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from forge_core.data.corpus import find_documents
from forge_core.data.source import SourceSpec
from forge_core.data.tokenizer import ByteTokenizer

SPEC = SourceSpec(
    name="source",
    path=None,
    split="all",
    seq_len=64,
    tokenizer=ByteTokenizer(),
    vocab_size=257,
    pack=True,
    holdout=0.0,
    seed=0,
)


def spec_of(path: Path | str, cache: Path, **changes: Any) -> SourceSpec:
    """All of `path`, with a cache folder of its own."""
    return attrs.evolve(SPEC, path=str(path), cache_dir=str(cache), **changes)


def python_sources(count: int, most: int = 20_000) -> list[str]:
    """Real documents: files of the standard library."""
    found = [d for d in find_documents(None, ["*"]) if d.size <= most][:count]
    return [document.read().decode("utf-8", "replace") for document in found]


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def byte_ids(texts: Iterable[str]) -> list[int]:
    """What the tokenizer of bytes makes of documents, each ended by 256."""
    return [i for text in texts for i in (*text.encode(), 256)]
