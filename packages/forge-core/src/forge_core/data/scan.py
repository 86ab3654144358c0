"""The largest token id of a file that nothing tells: read through once, then remembered."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

import numpy as np

from forge_core.data.cache import cache_folder, locked, make_folder, write_json
from forge_core.data.row import Shard
from forge_core.errors import DataError

CHUNK = 1 << 24
SMALL = 1 << 22
"""Files with fewer tokens are read each time."""
LONG = 1 << 28
"""Of files with more tokens, reading is told where only warnings are shown."""
_log = logging.getLogger("forge.data")


def largest_token(shard: Shard, cache_dir: str | None) -> int:
    """The largest id in a shard.

    The answer for a large file is kept in the cache folder, for its path, size and time of change; processes
    that ask for the same file wait for the first of them.

    Raises:
        DataError: the file holds a negative id.
    """
    if len(shard.tokens) < SMALL:
        return _read_through(shard)
    path = Path(shard.name)
    status = path.stat()
    about = f"{path.resolve()}/{status.st_size}/{status.st_mtime_ns}/{shard.tokens.dtype.str}"
    key = hashlib.blake2b(about.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    folder = cache_folder(cache_dir) / "scans"
    try:
        make_folder(folder)
        writable = os.access(folder, os.W_OK)
    except DataError:
        writable = False
    if not writable:
        _log.warning("cannot write to %s: the largest token id of %s is not remembered", folder, path)
        return _read_through(shard)
    known = folder / f"{key}.json"
    with locked(folder / f"{key}.lock"):
        if known.is_file():
            return int(json.loads(known.read_bytes())["max_token"])
        level = logging.WARNING if len(shard.tokens) > LONG else logging.INFO
        _log.log(level, "reading %s once for its largest token id", path)
        found = _read_through(shard)
        write_json(known, {"path": str(path), "max_token": found})
        return found


def _read_through(shard: Shard) -> int:
    largest = -1
    signed = shard.tokens.dtype.kind == "i"
    for at in range(0, len(shard.tokens), CHUNK):
        chunk = shard.tokens[at : at + CHUNK]
        largest = max(largest, int(chunk.max()))
        if signed and int(chunk.min()) < 0:
            where = at + int(np.argmax(chunk < 0))
            raise DataError(
                f"{shard.name}: token id {int(shard.tokens[where])} at {where} is negative",
                "these are no token ids; is data.tokens.dtype right?",
            )
    return largest
