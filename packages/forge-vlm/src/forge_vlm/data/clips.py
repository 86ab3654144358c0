"""The lengths of many videos, looked up once and remembered. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence

import attrs

from forge_core.data.cache import cache_folder, locked, make_folder, write_json
from forge_core.data.source import SourceSpec
from forge_core.errors import DataError
from forge_vlm.data.frames import Clip
from forge_vlm.data.picture import Blob
from forge_vlm.data.video import look_at

SMALL = 64
"""Fewer videos are opened at each start."""
Look = Clip | str
"""A video, or why it cannot be read."""
_log = logging.getLogger("forge.data")


def look_at_all(spec: SourceSpec, blobs: Sequence[Blob]) -> list[Look]:
    """How long each is. The answer for many is kept in the cache folder, for their paths, sizes and times of
    change; processes that ask for the same wait for the first of them."""
    if len(blobs) < SMALL:
        return [_look(blob) for blob in blobs]
    digest = hashlib.blake2b(digest_size=16)
    for blob in blobs:
        status = blob.path.stat() if blob.path.is_file() else None
        state = None if status is None else (status.st_size, status.st_mtime_ns)
        digest.update(repr((str(blob.path.resolve()), blob.offset, blob.size, state)).encode())
    folder = make_folder(cache_folder(spec.cache_dir) / "clips")
    known = folder / f"{digest.hexdigest()}.json"
    with locked(known.with_suffix(".lock")):
        if known.is_file():
            return [
                each if isinstance(each, str) else Clip(**each) for each in json.loads(known.read_bytes())
            ]
        _log.warning("%s: looking up the lengths of %d videos once", spec.name, len(blobs))
        found = [_look(blob) for blob in blobs]
        write_json(known, [each if isinstance(each, str) else attrs.asdict(each) for each in found])
        return found


def _look(blob: Blob) -> Look:
    try:
        return look_at(blob)
    except DataError as error:
        return error.message
