"""Sources that are encoded once, into the cache folder, and then read like any prepared corpus."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from pathlib import Path
from typing import Any

from forge_core.data.best_fit import BestFitTokens
from forge_core.data.cache import cache_folder, locked, make_folder
from forge_core.data.manifest import read_manifest
from forge_core.data.options import ChatOptions, JsonlOptions, ParquetOptions
from forge_core.data.pack import pack_row
from forge_core.data.packing import RowSource
from forge_core.data.prepare.job import Input, Job
from forge_core.data.prepare.readers import kind_of, reader_of
from forge_core.data.prepare.run import prepare
from forge_core.data.row import TokenRow
from forge_core.data.source import SourceSpec
from forge_core.data.token_corpus import open_corpus
from forge_core.data.tokens import corpus_row
from forge_core.errors import DataError

_TELL_EVERY = 5.0
_LARGE = 32 << 20
"""Bytes of input whose encoding takes long enough to be told where only warnings are shown."""
_log = logging.getLogger("forge.data")


def build_jsonl(spec: SourceSpec, options: JsonlOptions) -> RowSource:
    """Text of JSONL files.

    Raises:
        DataError: as `tokens.build`, and for a line that cannot be read, with file and line.
    """
    return prepared_text(spec, job_of(spec, kind="jsonl", field=options.field))


def build_parquet(spec: SourceSpec, options: ParquetOptions) -> RowSource:
    """Text of Parquet files.

    Raises:
        DataError: as `build_jsonl`. ForgeError: pyarrow is not installed.
    """
    return prepared_text(spec, job_of(spec, kind="parquet", field=options.field))


def build_chat(spec: SourceSpec, options: ChatOptions) -> RowSource:
    """Conversations of JSONL or Parquet files, whole ones put together by best fit, whatever `data.packing`
    says; the targets are the tokens of the assistant's answers.

    Raises:
        DataError: as `build_jsonl`; also where documents are not kept apart.
    """
    if not spec.pack:
        raise DataError(f"{spec.name}: conversations are always kept apart", "leave data.pack out")
    kind = kind_of(_path(spec))
    if kind not in ("jsonl", "parquet"):
        raise DataError(
            f"{spec.name}: {spec.path} is neither JSONL nor Parquet", "see the names of its files"
        )
    job = job_of(spec, kind=kind, field=options.field, template=options.template)
    row = prepared_row(spec, job)
    name = f"{spec.name} ({spec.path})"
    return BestFitTokens(
        row, seq_len=spec.seq_len, name=name, too_long="drop" if options.too_long == "drop" else "cut"
    )


def job_of(spec: SourceSpec, **keys: Any) -> Job:
    """How the documents of a source are encoded."""
    return Job(tokenizer=spec.tokenizer.name, loaded=spec.tokenizer, cache_dir=spec.cache_dir, **keys)


def prepared_text(spec: SourceSpec, job: Job) -> RowSource:
    """Samples of text that is encoded if it was not before."""
    return pack_row(prepared_row(spec, job), spec, f"{spec.name} ({spec.path})")


def prepared_row(spec: SourceSpec, job: Job) -> TokenRow:
    """The tokens of one split of `spec.path`.

    They lie in the cache folder under a hash of what they depend on: paths, sizes and times of change of the
    files, how they are read, the tokenizer. The first process encodes, others that ask for the same wait.
    """
    path = _path(spec)
    inputs = reader_of(job.kind).find([path], job)
    folder = make_folder(cache_folder(spec.cache_dir) / "tokens")
    key = _key(job, inputs)
    out = folder / key
    with locked(folder / f"{key}.lock"):
        if not _is_finished(out):
            large = sum(found.size for found in inputs) > _LARGE
            level = logging.WARNING if large else logging.INFO
            _log.log(level, "%s: encoding %s once, into %s", spec.name, path, out)
            prepare([path], job, out, progress=_Told(spec.name))
    try:
        corpus = open_corpus(str(out))
    except DataError as error:
        raise DataError(error.message, f"remove {out}; it is made again from {path}") from error
    return corpus_row(corpus, spec)


def _is_finished(out: Path) -> bool:
    try:
        return read_manifest(out) is not None
    except DataError:
        return False


def _path(spec: SourceSpec) -> str:
    if spec.path is None:
        raise DataError(f"data.path: the source {spec.name!r} needs the path of a file or folder")
    return spec.path


def _key(job: Job, inputs: list[Input]) -> str:
    about = {k: v for k, v in job.describe().items() if k != "tokenizer"}
    # a name of the hub is no path
    paths = [str(Path(found.path).resolve()) if Path(found.path).exists() else found.path for found in inputs]
    files = [[path, found.size, found.changed] for path, found in zip(paths, inputs, strict=True)]
    text = json.dumps([about, files], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


class _Told:
    """Tells the log how far an encoding is, now and then."""

    def __init__(self, name: str) -> None:
        self._name, self._at = name, time.monotonic()

    def __call__(self, done: int, total: int, tokens: int) -> None:
        now = time.monotonic()
        if now - self._at >= _TELL_EVERY and done < total:
            self._at = now
            _log.warning("%s: %d of %d shards encoded, %d tokens", self._name, done, total, tokens)
