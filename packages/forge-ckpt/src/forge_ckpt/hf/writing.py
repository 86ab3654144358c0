"""Writing folders of safetensors: one tensor in memory at a time, and the folder appears as a whole."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import attrs
import torch

from forge_ckpt.errors import CheckpointError, RequestError
from forge_ckpt.hf.folders import WEIGHTS, WEIGHTS_INDEX
from forge_ckpt.hf.weights import Info, Weights
from forge_ckpt.tensorfile import lay_out

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_PIECE = 16 << 20


def parse_size(text: str) -> int:
    """Bytes from "5GB", "500MB", "1GiB" or a plain number.

    Raises:
        CheckpointError: it is none of these.
    """
    digits = text.rstrip("BbKkMmGgTtIi ")
    unit = text[len(digits) :].strip().upper()
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise RequestError(f"{text!r} is no size", "such as 5GB, 500MB or 1GiB") from None
    if size < 1:
        raise RequestError(f"{text!r} leaves no room for a tensor")
    return size


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name at the end; after an error nothing is left.

    Raises:
        CheckpointError: something is there already, or the system refuses.
    """
    if path.name in ("", ".."):
        raise RequestError(f"{path} is no name for a new folder", "give one that does not exist yet")
    try:
        if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
            raise RequestError(f"{path} is there already", "choose another name, or remove it")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
    if path.is_mount():  # cannot be replaced, and that would be found out after all is written
        raise RequestError(f"{path} is where a file system is mounted", "give the name of a folder in it")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        for file in (*temporary.iterdir(), temporary):
            _sync(file)
        with suppress(FileNotFoundError):
            path.rmdir()
        temporary.rename(path)
        _sync(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@attrs.frozen
class Shard:
    """One file: its tensors in order, as they will be written."""

    file: str
    infos: Mapping[str, Info]


def plan_shards(infos: Mapping[str, Info], most: int) -> list[Shard]:
    """Files of at most `most` bytes each, in the order given; a larger tensor has a file of its own."""
    groups: list[dict[str, Info]] = [{}]
    size = 0
    for name, info in infos.items():
        if groups[-1] and size + info.bytes > most:
            groups.append({})
            size = 0
        groups[-1][name] = info
        size += info.bytes
    if len(groups) == 1:
        return [Shard(WEIGHTS, groups[0])]
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    return [Shard(name, group) for name, group in zip(names, groups, strict=True)]


def write_weights(
    weights: Weights,
    names: Sequence[str],
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
    told: Callable[[str], None] | None = None,
) -> int:
    """Write tensors as safetensors with an index, and return their bytes.

    Args:
        weights: where they come from; `names`: which, in order.
        dtype: of floating-point tensors; None: as they are.
        max_shard_size: bytes of a file.
        told: called with the name of each file that is done.
    """
    infos = {}
    for name in names:
        info = weights.info(name)
        infos[name] = attrs.evolve(info, dtype=dtype) if dtype and info.dtype.is_floating_point else info
    shards = plan_shards(infos, max_shard_size)
    for shard in shards:
        _write_shard(weights, shard, folder / shard.file)
        if told is not None:
            told(shard.file)
    total = sum(info.bytes for info in infos.values())
    if len(shards) > 1:
        place = {name: shard.file for shard in shards for name in shard.infos}
        index = {"metadata": {"total_size": total}, "weight_map": place}
        write_json(folder / WEIGHTS_INDEX, index)
    return total


def _write_shard(weights: Weights, shard: Shard, path: Path) -> None:
    layout = lay_out(((name, i.dtype, i.shape) for name, i in shard.infos.items()), {"format": "pt"})
    with path.open("wb") as file:
        file.write(layout.head)
        for name in layout.entries:
            _write_tensor(file, weights.read(name).to(shard.infos[name].dtype))


def _write_tensor(file: IO[bytes], tensor: torch.Tensor) -> None:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, len(raw), _PIECE):
        file.write(raw[start : start + _PIECE].numpy().data)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON object, readable."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
