"""The shards of a corpus of tokens: found, opened, checked against each other and against the model."""

from __future__ import annotations

import glob
import hashlib
from pathlib import Path

import attrs
import numpy as np

from forge_core.data.manifest import Manifest, read_manifest
from forge_core.data.row import Shard
from forge_core.data.scan import largest_token
from forge_core.data.shards import SIDECARS, open_shard
from forge_core.data.wording import counted
from forge_core.errors import DataError
from forge_core.files import user_path

SUFFIXES = (".npy", ".bin")
SAMPLED = 256
"""Stretches of a corpus that its fingerprint looks at."""
STRETCH = 2048


@attrs.frozen(kw_only=True, eq=False)
class TokenCorpus:
    """Opened shards, all of one type, with the manifest where there is one."""

    shards: tuple[Shard, ...]
    manifest: Manifest | None

    @property
    def tokens(self) -> int:
        return sum(len(shard.tokens) for shard in self.shards)

    def largest(self, number: int, cache_dir: str | None) -> int:
        """The largest id of a shard: the manifest's, or found by reading it once."""
        if self.manifest is not None:
            return self.manifest.shards[number].max_token
        return largest_token(self.shards[number], cache_dir)

    def identity(self) -> str:
        """Notices another corpus at little cost: numbers and sizes of shards, the manifest's checksums, and
        256 stretches that are spread over it. Not the place where it lies."""
        digest = hashlib.blake2b(digest_size=16)
        each = max(1, SAMPLED // len(self.shards))
        for number, shard in enumerate(self.shards):
            documents = -1 if shard.documents is None else len(shard.documents)
            digest.update(f"{shard.tokens.dtype.str}/{len(shard.tokens)}/{documents}/".encode())
            if self.manifest is not None:
                digest.update(repr(sorted(self.manifest.shards[number].checksums.items())).encode())
            for start in np.linspace(0, max(0, len(shard.tokens) - STRETCH), each).astype(np.int64).tolist():
                digest.update(np.ascontiguousarray(shard.tokens[start : start + STRETCH]).data)
                if shard.supervised is not None:
                    digest.update(np.ascontiguousarray(shard.supervised[start : start + STRETCH]).data)
            if shard.documents is not None:
                some = np.linspace(0, len(shard.documents) - 1, STRETCH).astype(np.int64)
                digest.update(shard.documents[some].tobytes())
        return digest.hexdigest()

    def check_vocabulary(self, vocab_size: int, cache_dir: str | None) -> int:
        """The largest id of all shards.

        Raises:
            DataError: an id is beyond the vocabulary; names the file, the id and the size.
        """
        largest = -1
        for number, shard in enumerate(self.shards):
            found = self.largest(number, cache_dir)
            if found >= vocab_size:
                raise DataError(
                    f"{shard.name}: token id {found} does not fit model.vocab_size = {vocab_size}",
                    f"set data.tokenizer to the one it was made with, or model.vocab_size to at least "
                    f"{found + 1}; if the ids look wrong, so may the type of the file",
                )
            largest = max(largest, found)
        return largest


def open_corpus(path: str, dtype: str | None = None) -> TokenCorpus:
    """Open the file, the folder or the pattern `path`. A folder with a `manifest.json` is what that says,
    another folder is its `.npy` and `.bin` files by name.

    Raises:
        DataError: no shards, or one that cannot be used; names it.
    """
    root = user_path(path)
    manifest = read_manifest(root) if root.is_dir() else None
    if manifest is not None:
        files = [root / record.name for record in manifest.shards]
    else:
        files = find_shards(root)
    shards = tuple(open_shard(file, dtype) for file in files)
    if not shards:
        raise DataError(f"{root} holds no tokens: the prepared corpus is empty", "prepare it again")
    for shard in shards[1:]:
        if shard.tokens.dtype != shards[0].tokens.dtype:
            raise DataError(
                f"{shard.name} holds {shard.tokens.dtype}, {shards[0].name} holds {shards[0].tokens.dtype}",
                "all shards of a corpus are of one type",
            )
        if (shard.supervised is None) != (shards[0].supervised is None):
            raise DataError(f"of {shard.name} and {shards[0].name} only one tells what is supervised")
    if manifest is not None:
        _compare(manifest, shards)
    return TokenCorpus(shards=shards, manifest=manifest)


def _compare(manifest: Manifest, shards: tuple[Shard, ...]) -> None:
    for record, shard in zip(manifest.shards, shards, strict=True):
        if len(shard.tokens) != record.tokens:
            tokens = counted(len(shard.tokens), "token")
            raise DataError(
                f"{shard.name} holds {tokens}, its manifest says {record.tokens}",
                "copy the folder again, or prepare the data again",
            )
        if shard.tokens.dtype != np.dtype(manifest.dtype):
            raise DataError(f"{shard.name} holds {shard.tokens.dtype}, its manifest says {manifest.dtype}")


def find_shards(root: Path) -> list[Path]:
    """Files of tokens that a path names, by name.

    Raises:
        DataError: none.
    """
    if root.is_file():
        return [root]
    if root.is_dir():
        found = [root / child.name for child in root.iterdir()]
    else:
        found = [Path(name) for name in glob.glob(str(root))]  # noqa: PTH207 - an absolute pattern
    kept = sorted(
        file
        for file in found
        if file.suffix in SUFFIXES and not file.name.startswith(".") and not file.name.endswith(SIDECARS)
    )
    if not kept:
        what = "no .npy or .bin file in" if root.is_dir() else "there is no file or folder"
        raise DataError(
            f"data.path: {what} {root}",
            "forge data prepare SOURCE --out FOLDER makes tokens from text",
        )
    return kept
