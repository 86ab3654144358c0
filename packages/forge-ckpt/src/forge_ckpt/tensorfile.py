"""The safetensors format, laid out ahead so that tensors are copied straight to where they end up in the
file.

A file is 8 bytes with the length of the header (little endian), the header (JSON: name -> dtype, shape, begin
and end among the data), and the data without gaps. Reading executes nothing.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from forge_ckpt.errors import DamagedError

NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
LENGTH_BYTES = 8
ALIGNMENT = 64
LONGEST_HEADER = 1 << 30


@attrs.frozen
class Entry:
    """A tensor of a file: dtype, shape, and its bytes `begin` to `end`, counted from the start of the
    file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@attrs.frozen
class Layout:
    """A file before it is written: `head` (length and header) and where each tensor goes; `size` in bytes."""

    head: bytes
    entries: Mapping[str, Entry]
    size: int


def lay_out(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], about: Mapping[str, str] | None = None
) -> Layout:
    """Where each tensor (name, dtype, shape) goes. Wide types come first, so that every tensor is aligned.

    Args:
        about: goes into the header as `__metadata__`.

    Raises:
        TypeError: a dtype that the format does not know.
    """
    ordered = sorted(tensors, key=lambda t: -t[1].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    spans: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]] = {}
    at = 0
    for name, dtype, shape in ordered:
        if dtype not in NAMES:
            raise TypeError(f"{name}: tensors of {dtype} cannot be saved")
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        spans[name] = (dtype, tuple(shape), at, end)
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    start = LENGTH_BYTES + len(text)
    entries = {n: Entry(dtype, shape, start + b, start + e) for n, (dtype, shape, b, e) in spans.items()}
    return Layout(len(text).to_bytes(LENGTH_BYTES, "little") + text, entries, start + at)


def place(layout: Layout, buffer: Tensor) -> dict[str, Tensor]:
    """Write the head into `buffer` (layout.size,) uint8 and return each tensor's place in it, typed."""
    buffer[: len(layout.head)].copy_(torch.frombuffer(bytearray(layout.head), dtype=torch.uint8))
    return {name: _view(buffer, entry) for name, entry in layout.entries.items()}


def as_tensor(data: memoryview) -> Tensor:
    """Bytes that may be written to as (n,) uint8, sharing memory with them."""
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


def read_entries(buffer: Tensor, file: str) -> dict[str, Entry]:
    """The tensors of a file whose bytes are `buffer` (n,) uint8.

    Raises:
        DamagedError: this is no such file, or it is cut short.
    """
    size = buffer.numel()
    try:
        length = int.from_bytes(buffer[:LENGTH_BYTES].numpy().tobytes(), "little")
        if size < LENGTH_BYTES or length > min(LONGEST_HEADER, size - LENGTH_BYTES):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        start = LENGTH_BYTES + length
        header = json.loads(buffer[LENGTH_BYTES:start].numpy().tobytes())
        header.pop("__metadata__", None)
        return {name: _entry(value, start, size) for name, value in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{file} is not a whole safetensors file: {error}", file) from error


def read_tensor(buffer: Tensor, entry: Entry) -> Tensor:
    """The tensor, sharing memory with `buffer` (n,) uint8."""
    return _view(buffer, entry)


def _entry(value: Mapping[str, Any], start: int, size: int) -> Entry:
    begin, end = value["data_offsets"]
    entry = Entry(DTYPES[value["dtype"]], tuple(value["shape"]), start + begin, start + end)
    if not start <= entry.begin <= entry.end <= size:
        raise ValueError(f"bytes {entry.begin} to {entry.end} of {size}")
    if entry.end - entry.begin != math.prod(entry.shape) * entry.dtype.itemsize:
        raise ValueError(f"{entry.end - entry.begin} bytes for {entry.shape} of {entry.dtype}")
    return entry


def _view(buffer: Tensor, entry: Entry) -> Tensor:
    raw = buffer[entry.begin : entry.end]
    if entry.begin % entry.dtype.itemsize:  # files of others need not be aligned
        raw = raw.clone()
    return raw.view(entry.dtype).view(entry.shape)
