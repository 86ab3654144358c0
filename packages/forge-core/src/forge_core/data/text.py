"""The source of real text: files or folders, or the sources of Python's standard library."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from forge_core.data.corpus import Document, find_documents, split_documents
from forge_core.data.options import TextOptions
from forge_core.data.pack import pack_row
from forge_core.data.packing import RowSource
from forge_core.data.row import Shard, TokenRow
from forge_core.data.source import SourceSpec
from forge_core.errors import DataError
from forge_core.files import user_path

_OTHER_KINDS = {
    "jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst"),
    "parquet": (".parquet",),
    "tokens": (".npy", ".bin"),
}
"""What another source reads, by the names of its files."""
_log = logging.getLogger("forge.data")


def build(spec: SourceSpec, options: TextOptions) -> RowSource:
    """Read, tokenise and lay out one split of a corpus; a file is a document. See `corpus` for which files
    are taken.

    Documents stand in an order fixed by their names and unrelated to it, not by the seed. The tokens stay in
    memory, two bytes each (four for vocabularies above 65536). A holdout shorter than a sequence becomes one
    short sequence.

    Raises:
        DataError: a file is missing or cannot be read, there is no text, or too little for one sequence; a
            folder of prepared tokens.
    """
    found = find_documents(spec.path, options.patterns, tell=spec.split != "holdout")
    if spec.path is not None and spec.split != "holdout":
        _look_at_names(spec.path, found)
    train, held = split_documents(found, 0.0 if spec.split == "all" else spec.holdout)
    documents = held if spec.split == "holdout" else train
    where = spec.path or "the standard library"
    if not documents:
        raise DataError(
            f"{spec.name}: {where} leaves nothing to hold out", "set data.holdout higher, or to 0 for none"
        )
    encoded = list(spec.tokenizer.encode_documents(document.read() for document in documents))
    index = np.cumsum([0, *(len(tokens) for tokens in encoded)], dtype=np.int64)
    name = f"{spec.name} ({where})"
    titles = [document.name for document in documents]
    shard = Shard(name=name, tokens=np.concatenate(encoded), documents=index, titles=titles)
    return pack_row(TokenRow([shard], end=spec.tokenizer.eos_id), spec, name)


def _look_at_names(path: str, documents: Sequence[Document]) -> None:
    """Say where files are taken as text that by their names are of another source.

    Raises:
        DataError: tokens that were prepared, of which the manifest alone would be read.
    """
    if any(user_path(path).glob("*.documents.npy")):
        raise DataError(
            f"{path} holds tokens that were prepared, and data.source is text", 'set data.source = "tokens"'
        )
    for source, suffixes in _OTHER_KINDS.items():
        if all(document.name.endswith(suffixes) for document in documents):
            _log.warning(
                'data.source is text, so %s is read as it is, byte by byte; is data.source = "%s" meant?',
                documents[0].name if len(documents) == 1 else f"each file in {path}",
                source,
            )
