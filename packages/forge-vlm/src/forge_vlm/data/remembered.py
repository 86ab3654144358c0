"""Samples that were laid out once, kept in the cache folder for the runs that follow. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from forge_core.data.cache import cache_folder, locked, make_folder, write_bytes, write_json
from forge_core.data.source import SourceSpec
from forge_core.data.tokenizer import fingerprint_of
from forge_core.errors import DataError, ForgeError
from forge_core.files import user_path
from forge_vlm.data.frames import code_of_sampler
from forge_vlm.data.options import SampleOptions
from forge_vlm.data.pieces import marks_of
from forge_vlm.data.stored import Columns
from forge_vlm.geometry import ImageShape
from forge_vlm.version import __version__

SMALL = 1000
"""Fewer samples are laid out at each start."""
_FORM = 1
_MAGIC = b"forge samples\n"
_ALIGNED = 64
_TEMPLATES = ("tokenizer_config.json", "chat_template.jinja")
_log = logging.getLogger("forge.data")


def key_of(
    spec: SourceSpec, options: SampleOptions, shape: ImageShape, inputs: Iterable[Path], further: str = ""
) -> str | None:
    """Changes with all that the samples of a source depend on, the contents of images and videos aside;
    None: that cannot be told, and nothing is remembered.

    Args:
        inputs: the files that name samples, told by path, size and time of change. further: what else.
    """
    code = code_of_sampler(spec)
    if code is None:
        return None
    states = []
    for path in inputs:
        status = path.stat()
        states.append((str(path.resolve()), status.st_size, status.st_mtime_ns))
    tokenizer = spec.tokenizer
    about: list[Any] = [_FORM, __version__, type(options).__name__, repr(options), states, further, code]
    about += [fingerprint_of(tokenizer), spec.seq_len, repr(shape), repr(marks_of(spec.config))]
    if options.template == "tokenizer":
        folder = user_path(tokenizer.name)
        folder = folder if folder.is_dir() else folder.parent
        about += [_digest((folder / name).read_bytes()) for name in _TEMPLATES if (folder / name).is_file()]
    return _digest(repr(about).encode("utf-8", "surrogatepass"))


class Remembered:
    """The samples of one key: `read`, or `hold`, make them and `write`. Inside of `with`.

    Processes that ask for the same wait for the first of them, and have its error where it fails. Where the
    cache cannot be written nothing is remembered, which is told.

    Args:
        spec: of the source. key: see `key_of`.
    """

    def __init__(self, spec: SourceSpec, key: str | None) -> None:
        self._spec, self._folder = spec, cache_folder(spec.cache_dir) / "samples"
        self._file = None if key is None else self._folder / f"{key}.samples"
        self._stack, self._began, self._held = ExitStack(), time.time(), False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if self._held and isinstance(error, ForgeError):
                write_json(self._failure, {"message": error.message, "hint": error.hint})

    def hold(self) -> None:
        """Wait for others that make the same.

        Raises:
            DataError: what they failed with meanwhile.
        """
        if self._file is None:
            return
        try:
            make_folder(self._folder)
            self._stack.enter_context(locked(self._file.with_suffix(".lock")))
        except ForgeError as error:
            _log.warning("%s: %s; its text is tokenised at every start", self._spec.name, error.message)
            self._file = None
            return
        self._raise_theirs()
        self._held = True

    def read(self) -> Columns | None:
        """What is remembered, if it is whole."""
        if self._file is None or not self._file.is_file():
            return None
        try:
            return read_columns(self._file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s is damaged, and made again: %s", self._file, error)
            return None

    def write(self, columns: Columns) -> None:
        """Remember samples."""
        if self._file is None or not self._held:
            return
        try:
            write_columns(self._file, columns)
            self._failure.unlink(missing_ok=True)
        except (ForgeError, OSError) as error:
            _log.warning("%s: its samples cannot be kept: %s", self._spec.name, error)

    @property
    def _failure(self) -> Path:
        assert self._file is not None
        return self._file.with_suffix(".failed")

    def _raise_theirs(self) -> None:
        try:
            if self._failure.stat().st_mtime < self._began:
                return
            found = json.loads(self._failure.read_bytes())
            message, hint = str(found["message"]), str(found["hint"])
        except (OSError, ValueError, KeyError, TypeError):
            return
        raise DataError(message, hint)


def digest_of(arrays: Any) -> str:
    """Of columns by name."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        digest.update(f"{name}/{arrays[name].dtype.str}/{arrays[name].shape}/".encode())
        digest.update(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def write_columns(path: Path, columns: Columns) -> None:
    """Write columns whole or not at all."""
    places, parts, at = {}, [], 0
    for name, values in columns.arrays.items():
        places[name] = [values.dtype.str, list(values.shape), at]
        content = values.tobytes()
        padding = -len(content) % _ALIGNED
        parts += [content, bytes(padding)]
        at += len(content) + padding
    head = json.dumps({"columns": places, "facts": columns.facts, "digest": columns.digest, "bytes": at})
    start = _MAGIC + f"{len(head):012d}".encode() + head.encode()
    write_bytes(path, b"".join([start, bytes(-len(start) % _ALIGNED), *parts]))


def read_columns(path: Path) -> Columns:
    """Columns of a file, which is mapped.

    Raises:
        ValueError, KeyError, TypeError: it is damaged. OSError: it cannot be read.
    """
    body = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))  # cut faster than what knows of its file
    size = len(_MAGIC) + 12
    if body[: len(_MAGIC)].tobytes() != _MAGIC:
        raise ValueError("it does not start as such a file does")
    end = size + int(body[len(_MAGIC) : size].tobytes())
    head = json.loads(body[size:end].tobytes())
    start = end + -end % _ALIGNED
    if len(body) - start != head["bytes"]:
        raise ValueError(f"it has {len(body) - start} bytes of samples, not {head['bytes']}")
    arrays = {}
    for name, (kind, shape, at) in head["columns"].items():
        dtype = np.dtype(kind)
        length = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        arrays[name] = body[start + at : start + at + length].view(dtype).reshape(shape)
    if digest_of(arrays) != head["digest"]:
        raise ValueError("its checksum is another")
    return Columns(arrays, head["digest"], head["facts"])


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
