"""A whole preparation: plan, shards by several processes, manifest last."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_core.data.cache import locked, make_folder, write_json
from forge_core.data.manifest import NAME, PLAN, Manifest, ShardRecord, read_manifest
from forge_core.data.prepare.job import SHARD_SIZE, Job, Unit
from forge_core.data.prepare.readers import reader_of
from forge_core.data.prepare.shard import (
    Outcome,
    read_record,
    record_path,
    start_worker,
    token_type,
    write_shard,
)
from forge_core.data.wording import counted
from forge_core.errors import DataError, LostProcessError

Progress = Callable[[int, int, int], None]
"""`progress(shards done, shards in all, tokens so far)`."""
_log = logging.getLogger("forge.data")


def prepare(
    sources: Sequence[str],
    job: Job,
    out: Path,
    *,
    shard_size: int = SHARD_SIZE,
    workers: int = 1,
    progress: Progress | None = None,
) -> Manifest:
    """Encode the sources into a folder that the source `tokens` reads.

    The files do not depend on the number of processes, nor on how often the work was interrupted: a shard is
    a fixed part of the input. Shards that an earlier call finished are verified and kept.

    Args:
        sources: files, folders or data sets of one kind.
        job: how they are read and encoded.
        out: the folder; empty, or begun or finished by the same call.
        shard_size: bytes of input that become one shard.
        workers: processes; with 1 this process does the work.
        progress: told after every shard.

    Raises:
        DataError: input that cannot be read, no text in it, or a folder that holds something else.
    """
    reader = reader_of(job.kind)
    inputs = reader.find(sources, job)
    plan = {
        **job.describe(),
        "shard_size": shard_size,
        "inputs": {
            "count": len(inputs),
            "bytes": sum(found.size for found in inputs),
            "checksum": _hash([[found.name, found.size] for found in inputs]),
        },
    }
    begun = {**plan, "changed": _hash([found.changed for found in inputs])}
    make_folder(out)
    with locked(out / ".lock"):
        manifest = _existing(out, plan, begun)
        units = reader.cut(inputs, job, shard_size)
        if manifest is None:
            write_json(out / PLAN, begun)
            records = _work(units, job, out, workers, progress or (lambda *_: None))
            manifest = Manifest(
                plan=plan,
                dtype=token_type(plan["vocab_size"]).name,
                shards=tuple(record for record in records if record.tokens),
            )
            if not manifest.shards:
                raise DataError(f"there is no text in {', '.join(sources)}", "no document has any")
            manifest.write(out)
        _tidy(out, len(units))
    return manifest


def _hash(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def _existing(out: Path, plan: dict[str, Any], begun: dict[str, Any]) -> Manifest | None:
    """The manifest if the same plan was carried out, None if it is still to do.

    Raises:
        DataError: the folder holds something else.
    """
    if (out / NAME).is_file():
        manifest = read_manifest(out)
        assert manifest is not None
        if _same(manifest.plan, plan):
            return manifest
        raise DataError(f"{out} holds another preparation: {_differs(manifest.plan, plan)}", _ELSEWHERE)
    if (out / PLAN).is_file():
        try:
            earlier = json.loads((out / PLAN).read_bytes())
        except ValueError as error:
            raise DataError(f"{out / PLAN} is damaged: {error}", _ELSEWHERE) from error
        if not _same(earlier, begun):
            raise DataError(
                f"{out} holds the start of another preparation: {_differs(earlier, begun)}", _ELSEWHERE
            )
        return None
    others = [path.name for path in out.iterdir() if not path.name.startswith(".")]
    if others:
        raise DataError(f"{out} is not empty: it holds {sorted(others)[0]}", _ELSEWHERE)
    return None


_ELSEWHERE = "choose another folder, or remove this one"


def _same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return not _differs(first, second)


def _differs(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Keys in which two plans differ; the name of a tokenizer may be another path to the same."""
    second = json.loads(json.dumps(second))
    keys = [key for key in {**first, **second} if key != "tokenizer" and first.get(key) != second.get(key)]
    return ", ".join(f"other {key}" for key in keys)


def _work(units: Sequence[Unit], job: Job, out: Path, workers: int, progress: Progress) -> list[ShardRecord]:
    records: dict[int, ShardRecord] = {}
    for number in range(len(units)):
        record = read_record(out, number)
        if record is not None:
            records[number] = record
    if records:
        _log.info("%d of %s there already", len(records), counted(len(units), "shard"))
    todo = [number for number in range(len(units)) if number not in records]
    progress(len(records), len(units), sum(record.tokens for record in records.values()))
    for number, record in _shards(todo, units, job, out, workers):
        records[number] = record
        progress(len(records), len(units), sum(record.tokens for record in records.values()))
    return [records[number] for number in sorted(records)]


def _shards(
    todo: Sequence[int], units: Sequence[Unit], job: Job, out: Path, workers: int
) -> Iterator[tuple[int, ShardRecord]]:
    workers = min(workers, len(todo))
    if workers <= 1:
        for number in todo:
            yield number, _checked(write_shard(number, units[number], job, out))
        return
    # spawned, not forked: the tokenizers of this process have threads, which do not survive a fork
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker) as pool:
        with _interruptions_wait():  # a process that is about to start would show a traceback
            running = {pool.submit(write_shard, number, units[number], job, out): number for number in todo}
        try:
            for done in as_completed(running):
                yield running[done], _checked(done.result())
        except BrokenProcessPool as error:
            raise LostProcessError(
                "a process that prepared data died; the machine may be short of memory",
                "run the same command again with fewer --workers; it goes on where it stopped",
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _interruptions_wait() -> Iterator[None]:
    """Processes that start inside do not get an interruption from the terminal; this one gets it behind."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _checked(outcome: Outcome) -> ShardRecord:
    if isinstance(outcome, DataError):
        raise outcome
    return outcome


def _tidy(out: Path, units: int) -> None:
    """Remove what was needed only while the work went on."""
    for path in (*(record_path(out, number) for number in range(units)), out / PLAN, *out.glob(".*.tmp")):
        path.unlink(missing_ok=True)
