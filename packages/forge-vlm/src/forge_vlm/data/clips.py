"""The lengths of many videos, looked up once and remembered. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs

from forge_core.data.cache import cache_folder, locked, make_folder, write_json
from forge_core.data.source import SourceSpec
from forge_core.errors import DataError
from forge_core.files import user_path
from forge_vlm.data.frames import Clip, Sampler
from forge_vlm.data.passing import Passing
from forge_vlm.data.picture import MEND, Blob, Footage, Frame
from forge_vlm.data.video import footage, look_at, picked
from forge_vlm.geometry import shape_of

SMALL = 64
"""Fewer videos are opened at each start."""
_log = logging.getLogger("forge.data")


class Looks:
    """What is known of the videos of a source: `look(blob)`, inside of `with`.

    The answers for many are kept in the cache folder, for the path, size and time of change of each file;
    processes that look at the same data set wait for the first of them. An error that passes is not kept.

    Args:
        spec: of the source.

    Attributes:
        passing: what cannot be read just now.
    """

    def __init__(self, spec: SourceSpec) -> None:
        about = str(user_path(spec.path or "").resolve())
        key = hashlib.blake2b(about.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
        self._spec, self._file = spec, cache_folder(spec.cache_dir) / "clips" / f"{key}.json"
        self._known: dict[str, Any] = {}
        config = spec.config
        sees = config is not None and "vlm" in config
        self._upright = sees and shape_of(config).geometry.kind == "packed"  # type: ignore[arg-type]
        self._states: dict[Path, str] = {}
        self.passing = Passing()
        self._stack, self._new = ExitStack(), 0
        self._opened = False  # nothing is asked where samples are remembered

    @property
    def together(self) -> bool:
        """Whether the encoder of the run sees the frames of a video together."""
        config = self._spec.config
        return config is not None and "vlm" in config and shape_of(config).clips

    def __enter__(self) -> Looks:
        return self

    def __exit__(self, *error: object) -> None:
        with self._stack:
            if self._new >= SMALL:
                write_json(self._file, self._known)

    def __call__(self, blob: Blob) -> Clip:
        """How long a video is.

        Raises:
            DataError: it cannot be read.
        """
        key = self._key(blob)
        if not self._opened:
            self._opened = True
            self._read()
        if key not in self._known:
            self._count()
        if key not in self._known:  # also not to the process that was waited for
            self._known[key] = self._look(blob)
        found = self._known[key]
        if isinstance(found, str):
            raise DataError(found)
        return Clip(**found)

    def _key(self, blob: Blob) -> str:
        if blob.path not in self._states:
            try:
                status = blob.path.stat() if blob.path.is_file() else None
            except OSError as error:
                raise self._noted(blob, error) from error
            state = "" if status is None else f"{status.st_size}/{status.st_mtime_ns}"
            self._states[blob.path] = f"{blob.path}/{state}"
        return f"{self._states[blob.path]}/{blob.offset}" + ("/upright" if self._upright else "")

    def _noted(self, blob: Blob, error: OSError) -> DataError:
        found = DataError(f"cannot read the video {blob}: {error.strerror or error}")
        found.__cause__ = error
        self.passing.note(found)
        return found

    def _look(self, blob: Blob) -> dict[str, Any] | str:
        """What is kept of a video: how long it is, or what is wrong with it.

        Raises:
            DataError: it cannot be read just now.
        """
        try:
            return attrs.asdict(look_at(blob, self._upright))
        except DataError as error:
            if self.passing.note(error):
                raise
            return error.message

    def _count(self) -> None:
        """One more that is not known; when they are many, wait for others that look at them, too."""
        self._new += 1
        if self._new == SMALL:
            make_folder(self._file.parent)
            self._stack.enter_context(locked(self._file.with_suffix(".lock")))
            self._read()
            _log.warning("%s: looking up the lengths of its videos once", self._spec.name)

    def _read(self) -> None:
        try:
            if self._file.is_file():
                self._known |= json.loads(self._file.read_bytes())
        except (OSError, ValueError, TypeError) as error:
            _log.warning("%s is damaged, and made again: %s", self._file, error)


def frames_or_mask(clip: Blob, look: Looks, sampler: Sampler, mask: bool) -> tuple[Frame | Footage, ...]:
    """The frames of a video that a policy picks, or the one clip that they are to an encoder that sees them
    together. With `mask`, one that cannot be read has one frame, which is found out again when its sample is
    read, and masked and counted there.

    Raises:
        DataError: it cannot be read; a policy that picks none.
    """
    try:
        found = look(clip)
    except DataError as error:
        if not mask:
            raise DataError(error.message, error.hint or MEND) from error
        if look.together:
            return (Footage(clip=clip, times=(0.0,), seconds=1.0),)
        return (Frame(clip, 0.0),)
    return (footage(clip, found, sampler),) if look.together else picked(clip, found, sampler)
