"""Look at every byte of a preparation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from forge_core.data.manifest import Manifest, ShardRecord, checksum, read_manifest
from forge_core.data.shards import open_shard
from forge_core.errors import DataError


def verify(folder: Path) -> Manifest:
    """Compare every file with the manifest: checksums, counts, largest id, order of the documents.

    Raises:
        DataError: the first thing that is wrong, with the name of its file.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(
            f"{folder} has no manifest.json", "only what forge data prepare wrote can be verified"
        )
    for record in manifest.shards:
        for message in _faults(folder, record):
            raise DataError(message, "remove the folder and prepare the data again, or copy it again")
    return manifest


def _faults(folder: Path, record: ShardRecord) -> Iterator[str]:
    for name, known in record.checksums.items():
        if not (folder / name).is_file():
            yield f"{folder / name} is missing"
        elif checksum(folder / name) != known:
            yield f"{folder / name} is not what was written: its checksum is another"
    shard = open_shard(folder / record.name)
    if len(shard.tokens) != record.tokens or int(shard.tokens.max()) != record.max_token:
        yield f"{shard.name}: number of tokens or largest id is not that of the manifest"
    if shard.documents is not None and (
        len(shard.documents) - 1 != record.documents or np.any(np.diff(shard.documents) <= 0)
    ):
        yield f"{shard.name}: the index of documents is out of order or of another length"
