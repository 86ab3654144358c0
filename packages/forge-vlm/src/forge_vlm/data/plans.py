"""Which samples share a row, planned once and kept in the cache folder. Imports no torch."""

from __future__ import annotations

import hashlib
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_core.data.cache import cache_folder, locked, make_folder
from forge_core.data.source import SourceSpec
from forge_core.errors import DataError
from forge_vlm.data.packing import Rows, Size
from forge_vlm.data.remembered import digest_of, read_columns, write_columns
from forge_vlm.data.stored import Columns
from forge_vlm.version import __version__

SMALL = 10_000
"""Fewer samples are planned at each start, in a fraction of a second."""
_PLANNER = 1
"""Another number where `packing` makes other rows of the same samples."""
_log = logging.getLogger("forge.data")


def planned(spec: SourceSpec, sizes: NDArray[Any], most: Size, how: str | None) -> Rows:
    """`Rows.of`, remembered in the cache folder for all that it depends on, with a checksum. Processes that
    ask for the same wait for the first of them; where the cache cannot be written each plans for itself.

    Args:
        spec: of the source. sizes, most, how: see `Rows.of`.
    """
    if how is None or len(sizes) < SMALL:
        return Rows.of(sizes, most, how)
    about = repr((_PLANNER, __version__, most, how, digest_of({"sizes": sizes})))
    folder = cache_folder(spec.cache_dir) / "samples"
    file = folder / f"{hashlib.blake2b(about.encode(), digest_size=16).hexdigest()}.rows"
    found = _read(file, len(sizes))
    if found is not None:
        return found
    with ExitStack() as stack:
        try:
            make_folder(folder)
            stack.enter_context(locked(file.with_suffix(".rows-lock")))
        except DataError as error:
            _log.warning("%s: which samples share a sequence cannot be kept: %s", spec.name, error.message)
            return Rows.of(sizes, most, how)
        found = _read(file, len(sizes))
        if found is None:
            found = Rows.of(sizes, most, how)
            _write(file, found, spec)
    return found


def _read(file: Path, count: int) -> Rows | None:
    """What is kept, if it is whole and of so many samples."""
    if not file.is_file():
        return None
    try:
        arrays = read_columns(file).arrays
        order, ends = arrays["order"], arrays["ends"]
        if len(order) != count or ends[-1] != count:
            raise ValueError(f"it is of {len(order)} samples, not of {count}")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        _log.warning("%s is damaged, and made again: %s", file, error)
        return None
    return Rows(order, ends)


def _write(file: Path, rows: Rows, spec: SourceSpec) -> None:
    assert rows.ends is not None
    arrays = {"order": rows.order.astype(np.int64), "ends": rows.ends}
    try:
        write_columns(file, Columns(arrays, digest_of(arrays), {}))
    except DataError as error:
        _log.warning("%s: which samples share a sequence cannot be kept: %s", spec.name, error.message)
