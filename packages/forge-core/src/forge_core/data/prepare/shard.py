"""One unit of work: read, encode, and write a shard with the record that it is complete."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_core.data.cache import write_bytes, write_json
from forge_core.data.manifest import ShardRecord, checksum
from forge_core.data.prepare.encode import encode_unit
from forge_core.data.prepare.job import Job, Unit
from forge_core.data.shards import SIDECARS
from forge_core.errors import DataError, ForgeError

Outcome = ShardRecord | DataError
"""A record, or what went wrong."""


def start_worker() -> None:
    """What each further process does first: the processes share the cores, so each uses one, and none
    outlives the first."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def shard_name(number: int) -> str:
    return f"tokens-{number:05d}.npy"


def record_path(folder: Path, number: int) -> Path:
    """Where the record of a shard lies while the preparation goes on."""
    return folder / f"tokens-{number:05d}.json"


def write_shard(number: int, unit: Unit, job: Job, folder: Path) -> Outcome:
    """Encode a unit and write its files, its record last."""
    try:
        return _write(number, unit, job, folder)
    except DataError as error:
        return error
    except ForgeError as error:
        return DataError(error.message, error.hint)


def _write(number: int, unit: Unit, job: Job, folder: Path) -> ShardRecord:
    documents = []
    masks = []
    for tokens, learnt in encode_unit(unit, job):
        documents.append(tokens)
        if learnt is not None:
            masks.append(learnt)
    dtype = token_type(job.load_tokenizer().vocab_size)
    ids = np.concatenate(documents).astype(dtype, copy=False) if documents else np.empty(0, dtype=dtype)
    name = shard_name(number)
    files: dict[str, NDArray[Any]] = {}
    if len(ids):
        files[name] = ids
        index = np.cumsum([0, *(len(tokens) for tokens in documents)], dtype=np.int64)
        files[name.removesuffix(".npy") + SIDECARS[0]] = index
        if job.template is not None:
            files[name.removesuffix(".npy") + SIDECARS[1]] = np.concatenate(masks)
    for file, array in files.items():
        _save(folder / file, array)
    record = ShardRecord(
        name=name if len(ids) else "",
        tokens=len(ids),
        documents=len(documents),
        max_token=int(ids.max()) if len(ids) else -1,
        supervised=int(sum(mask.sum() for mask in masks)) if job.template is not None else len(ids),
        checksums={file: checksum(folder / file) for file in files},
    )
    write_json(record_path(folder, number), attrs.asdict(record))
    return record


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _save(path: Path, array: NDArray[Any]) -> None:
    content = io.BytesIO()
    np.save(content, array)
    write_bytes(path, content.getbuffer())


def read_record(folder: Path, number: int) -> ShardRecord | None:
    """The record of a shard whose files are all there and unchanged; None where it must be made."""
    try:
        record = ShardRecord(**json.loads(record_path(folder, number).read_bytes()))
        whole = all(checksum(folder / name) == known for name, known in record.checksums.items())
    except (OSError, ValueError, TypeError):
        return None
    return record if whole else None
