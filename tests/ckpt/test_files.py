"""Files are written whole, whether past the system's cache or through it."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from forge_ckpt.files import BLOCK, DIRECT, map_bytes
from forge_ckpt.staging import StagedFile
from forge_ckpt.store import DIRECT_FROM, PIECE, write_file

SIZES = [0, 1, BLOCK, DIRECT_FROM - 1, DIRECT_FROM, DIRECT_FROM + 5, PIECE, PIECE + BLOCK + 7]


def content(size: int) -> Any:
    """Bytes at an address that a direct write takes."""
    staged = StagedFile({"a": torch.empty(size + BLOCK, dtype=torch.uint8)})
    staged.buffer.copy_(torch.arange(staged.buffer.numel()) % 251)
    return staged.data[:size]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("begin", [0, 1])
def test_what_is_read_is_what_was_written(size: int, begin: int, tmp_path: Path) -> None:
    """From an address that is a multiple of a block, and from the byte after it."""
    data = content(size + begin)[begin:]
    found = write_file(tmp_path / "a", [data])
    assert (tmp_path / "a").read_bytes() == data.tobytes()
    assert (found.size, found.xxh3) == (size, xxhash.xxh3_128_hexdigest(data))
    assert map_bytes(tmp_path / "a", "a") == data


def test_parts_one_after_another(tmp_path: Path) -> None:
    """The first is no whole number of blocks, so that the second begins inside of one."""
    parts = [content(DIRECT_FROM + 3), b"between", content(2 * BLOCK)]
    write_file(tmp_path / "a", parts)
    assert (tmp_path / "a").read_bytes() == b"".join(bytes(part) for part in parts)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("call", ["open", "write"])
def test_where_there_are_no_direct_writes(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = {"open": os.open, "write": os.write}, []

    def opened(path: Any, flags: int, *more: Any) -> int:
        if flags & DIRECT and call == "open":
            refused.append(path)
            raise OSError(code, "no")
        return real["open"](path, flags, *more)

    def written(file: int, data: Any) -> int:
        if call == "write" and not refused:
            refused.append(file)
            raise OSError(code, "no")
        return real["write"](file, data)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "write", written)
    data = content(3 * PIECE)
    write_file(tmp_path / "a", [data])
    assert refused
    assert (tmp_path / "a").read_bytes() == data.tobytes()


def test_more_files_than_a_process_may_have_open(tmp_path: Path) -> None:
    """Each mapped file counts as one; of a checkpoint of many ranks all are mapped together."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()) + 5
    for number in range(few):  # numbers below the highest may be free
        (tmp_path / str(number)).write_bytes(bytes([number % 256]) * 100)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        mapped = [map_bytes(tmp_path / str(number), "some") for number in range(few)]
        assert [bytes(data) for data in mapped] == [bytes([number % 256]) * 100 for number in range(few)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_that_does_not_fit_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full after some bytes of a piece."""
    real, seen = os.write, []

    def write(file: int, data: Any) -> int:
        seen.append(len(data))
        if len(seen) == 1:
            return real(file, data[:BLOCK])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "a", [content(PIECE)])
    assert seen == [PIECE, PIECE - BLOCK]
    assert list(tmp_path.iterdir()) == []
