"""What a folder of prepared tokens holds: `manifest.json`, written last."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import attrs

from forge_core.data.cache import write_json
from forge_core.data.corpus import unreadable
from forge_core.errors import DataError

NAME = "manifest.json"
PLAN = "plan.json"
"""There while a preparation is not finished."""
VERSION = 1


@attrs.frozen(kw_only=True)
class ShardRecord:
    """One shard.

    Attributes:
        name: of the file of tokens, or "" where the input of this shard held no text.
        tokens, documents: how many.
        max_token: largest id, -1 without tokens.
        supervised: tokens that are learnt; all of them unless the data is a chat.
        checksums: blake2b of each file, by name.
    """

    name: str
    tokens: int
    documents: int
    max_token: int
    supervised: int
    checksums: dict[str, str]


@attrs.frozen(kw_only=True)
class Manifest:
    """A finished preparation.

    Attributes:
        plan: what was prepared and how; equal plans give equal files.
        dtype: of the tokens.
        shards: in order, those without tokens left out.
    """

    plan: dict[str, Any]
    dtype: str
    shards: tuple[ShardRecord, ...]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def max_token(self) -> int:
        return max((shard.max_token for shard in self.shards), default=-1)

    def write(self, folder: Path) -> None:
        """As `manifest.json`, whole or not at all."""
        write_json(
            folder / NAME,
            {
                "version": VERSION,
                "tokens": self.tokens,
                "documents": self.documents,
                "max_token": self.max_token,
                "dtype": self.dtype,
                "plan": self.plan,
                "shards": [attrs.asdict(shard) for shard in self.shards],
            },
        )


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, or None if it has none.

    Raises:
        DataError: it cannot be read, or the folder is a preparation that was not finished.
    """
    path = folder / NAME
    if not path.is_file():
        if (folder / PLAN).is_file():
            raise DataError(
                f"{folder} is a preparation that was not finished",
                "run the same forge data prepare again; it goes on where it stopped",
            )
        return None
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != VERSION:
            raise DataError(f"{path} is of version {content['version']}, this Forge reads {VERSION}")
        shards = tuple(ShardRecord(**shard) for shard in content["shards"])
        return Manifest(plan=dict(content["plan"]), dtype=str(content["dtype"]), shards=shards)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error!r}", "prepare the data again") from error


def checksum(path: Path) -> str:
    """blake2b of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
