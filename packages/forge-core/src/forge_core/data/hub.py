"""Hugging Face data sets, by number or as a stream. The library is imported only here."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_core.data.cache import cache_folder
from forge_core.errors import DataError, ForgeError
from forge_core.files import user_path

BUILDERS = {
    ".jsonl": "json",
    ".json": "json",
    ".gz": "json",
    ".zst": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
}


def load_rows(path: str, options: Mapping[str, Any], cache_dir: str | None) -> Any:
    """A `datasets.Dataset`: a folder that `save_to_disk` wrote, files (by suffix, or `options["format"]`), or
    the name of a data set of the hub.

    Args:
        path: see above. options: `split`, `format`, `name`, `revision`.

    Raises:
        DataError: it cannot be loaded. ForgeError: the library is not installed.
    """
    return _load(path, options, cache_dir, streaming=False)


def load_stream(path: str, options: Mapping[str, Any], cache_dir: str | None) -> Any:
    """The same as a `datasets.IterableDataset`."""
    return _load(path, options, cache_dir, streaming=True)


def local_files(path: str) -> list[Path]:
    """The files that a path names; none if it is a name of the hub."""
    root = user_path(path)
    if root.is_file():
        return [root]
    return sorted(file for file in root.rglob("*") if file.is_file()) if root.is_dir() else []


def _load(path: str, options: Mapping[str, Any], cache_dir: str | None, streaming: bool) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ForgeError(
            f"the data set {path} needs the package 'datasets'", "pip install datasets"
        ) from error
    check_there(path)
    datasets.disable_progress_bars()
    if path.startswith("~"):
        path = str(user_path(path))
    try:
        with _quiet():
            return _loaded(datasets, path, options, cache_dir, streaming)
    except ForgeError:
        raise
    except Exception as error:  # the library raises many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"the data set {path} cannot be loaded: {reason}", _HINT) from error


def check_there(path: str) -> None:
    """Refuse what can only be a path and leads nowhere, before a hub is asked for it.

    Raises:
        DataError: nothing is there. Patterns, addresses and names of the hub (`owner/name`) pass.
    """
    if "://" in path or any(sign in path for sign in "*?["):
        return
    local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if local and not user_path(path).exists():
        raise DataError(f"there is no file or folder {path}", _HINT)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines that the libraries write about each failed try: the error says it once."""
    before = {name: logging.getLogger(name).level for name in _LOUD}
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _loaded(
    datasets: Any, path: str, options: Mapping[str, Any], cache_dir: str | None, streaming: bool
) -> Any:
    split = options.get("split") or "train"
    if _saved(path):
        found = _pick(datasets.load_from_disk(path), split, path)
        return found.to_iterable_dataset() if streaming else found
    common = {"split": split, "streaming": streaming, "cache_dir": str(cache_folder(cache_dir) / "hf")}
    builder = options.get("format") or _builder(path)
    if builder is not None:
        files = [str(file) for file in local_files(path)] or [path]
        common["split"] = "train"
        return datasets.load_dataset(builder, data_files=files, **common)
    name, revision = options.get("name"), options.get("revision")
    return datasets.load_dataset(path, name, revision=revision, **common)


_LOUD = ("datasets", "huggingface_hub", "huggingface_hub.utils._http", "httpx", "fsspec")
_HINT = "a folder written by save_to_disk, files of JSON, Parquet or text, or a name of the hub"


def _saved(path: str) -> bool:
    folder = user_path(path)
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _pick(found: Any, split: str, path: str) -> Any:
    if not isinstance(found, dict):
        return found
    if split not in found:
        raise DataError(
            f"the data set {path} has no split {split!r}", f"data.hf.split is one of {', '.join(found)}"
        )
    return found[split]


def _builder(path: str) -> str | None:
    suffixes = {file.suffix for file in local_files(path)}
    builders = {BUILDERS.get(suffix) for suffix in suffixes}
    return builders.pop() if len(builders) == 1 else None  # else the library finds out itself
