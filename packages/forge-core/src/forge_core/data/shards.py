"""Files of tokens: `.npy`, and `.bin` with a header or of a type that is told. Mapped, never read whole."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from forge_core.data.corpus import unreadable
from forge_core.data.row import Shard
from forge_core.data.wording import counted
from forge_core.errors import DataError

MAGIC = b"FORGETOK"
HEADER = struct.Struct("<8sII8sQ")
"""Of a `.bin`: magic, version, bytes of the header, numpy's name of the type, number of tokens."""
VERSION = 1
INT_HEADER = 1024
"""Bytes of the header of 256 int32 that GPT-2 speed runs use: magic, version, number of tokens, zeros."""
INT_MAGICS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
SIDECARS = (".documents.npy", ".supervised.npy")
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


def bin_header(dtype: np.dtype[Any], tokens: int) -> bytes:
    """The header of a `.bin` file; `tokens` ids of `dtype` follow it."""
    name = dtype.newbyteorder("<").str.encode()
    return HEADER.pack(MAGIC, VERSION, HEADER.size, name, tokens)


def open_shard(path: Path, dtype: str | None = None) -> Shard:
    """Map one file of tokens, with the index of its documents and what is supervised where these lie beside
    it: `NAME.documents.npy` (d + 1,) int64 and `NAME.supervised.npy` (n,) of one byte.

    Args:
        path: `.npy` or `.bin`.
        dtype: of a `.bin` without header.

    Raises:
        DataError: naming the file: missing, empty, cut short, no tokens, of a type that is not told.
    """
    try:
        tokens = _map_tokens(path, dtype)
        documents = _beside(path, SIDECARS[0])
        supervised = _beside(path, SIDECARS[1])
    except OSError as error:
        raise unreadable(path, error) from error
    if not len(tokens):
        raise DataError(f"{path} holds no tokens", "remove it")
    if documents is not None:
        _check_index(path, documents, len(tokens))
    if supervised is not None and (len(supervised) != len(tokens) or supervised.itemsize != 1):
        raise DataError(
            f"{path}: {SIDECARS[1][1:]} has {len(supervised)} entries of {supervised.dtype} for "
            f"{counted(len(tokens), 'token')}",
            "prepare the data again",
        )
    return Shard(name=str(path), tokens=tokens, documents=documents, supervised=supervised)


def sidecar(path: Path, suffix: str) -> Path:
    """`tokens-00000.npy` -> `tokens-00000.documents.npy`."""
    return path.with_name(path.stem + suffix)


def _map_tokens(path: Path, dtype: str | None) -> NDArray[Any]:
    with path.open("rb") as file:
        if path.suffix == ".npy":
            return _map_npy(path, file)
        found = _read_header(file)
        size = path.stat().st_size
    if found is None:
        if dtype is None:
            raise DataError(
                f"{path} has no header that tells the type of its tokens",
                f'name it: data.tokens.dtype = "uint16" (one of {", ".join(DTYPES)})',
            )
        kind = np.dtype(dtype).newbyteorder("<")
        if size % kind.itemsize:
            raise DataError(
                f"{path} is cut short or of another type: {size} bytes are no multiple of {kind.itemsize}, "
                f"the size of {dtype}",
                "copy it again, or correct data.tokens.dtype",
            )
        return _map(path, kind, size // kind.itemsize, 0, size)
    kind, tokens, offset = found
    if dtype is not None and np.dtype(dtype) != kind:
        raise DataError(
            f"{path} holds {kind} by its header, data.tokens.dtype says {dtype}", "leave the key out"
        )
    return _map(path, kind, tokens, offset, size)


def _read_header(file: BinaryIO) -> tuple[np.dtype[Any], int, int] | None:
    """Type, number of tokens and size of the header of a `.bin`; None if it has none."""
    start = file.read(INT_HEADER)
    if start.startswith(MAGIC) and len(start) >= HEADER.size:
        _, version, size, name, tokens = HEADER.unpack(start[: HEADER.size])
        if version != VERSION:
            raise DataError(f"{file.name} has a header of version {version}, this Forge reads {VERSION}")
        return np.dtype(name.rstrip(b"\0").decode()), tokens, size
    if len(start) == INT_HEADER:
        magic, version, tokens = struct.unpack("<3i", start[:12])
        kind = INT_MAGICS.get((magic, version))
        if kind is not None and not any(start[12:]):
            return np.dtype(kind), tokens, INT_HEADER
    return None


def _map_npy(path: Path, file: BinaryIO) -> NDArray[Any]:
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(file)
    except ValueError as error:
        raise DataError(f"{path} is no .npy file, or its header is cut short: {error}") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise DataError(f"{path} holds {dtype} of shape {shape}", "tokens are integers in one dimension")
    return _map(path, dtype, shape[0], file.tell(), path.stat().st_size)


def _map(path: Path, dtype: np.dtype[Any], tokens: int, offset: int, size: int) -> NDArray[Any]:
    if size < offset + tokens * dtype.itemsize:
        raise DataError(
            f"{path} is cut short: its header promises {tokens} tokens of {dtype}, "
            f"it holds {max(0, size - offset) // dtype.itemsize}",
            "copy it again",
        )
    if not tokens:
        return np.empty(0, dtype=dtype)
    mapped = np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(tokens,))
    return mapped.view(np.ndarray)  # slicing a memmap costs several times as much


def _beside(path: Path, suffix: str) -> NDArray[Any] | None:
    found = sidecar(path, suffix)
    if not found.is_file():
        return None
    with found.open("rb") as file:
        return _map_npy(found, file)


def _check_index(path: Path, documents: NDArray[Any], tokens: int) -> None:
    """The ends only; `verify` looks at all of it."""
    first, last = (int(documents[0]), int(documents[-1])) if len(documents) else (0, 0)
    if documents.dtype != np.int64 or len(documents) < 2 or (first, last) != (0, tokens):
        raise DataError(
            f"{path}: {SIDECARS[0][1:]} does not fit: {documents.dtype} from {first} to {last} for "
            f"{counted(tokens, 'token')}",
            "it starts with 0 and ends with the number of tokens; prepare the data again",
        )
