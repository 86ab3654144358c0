"""Samples to micro-batches: rows of numpy arrays, read from one or several sources, to torch tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forge_core.contract import Batch, SampleSource
from forge_core.data.source import Arrays
from forge_core.errors import DataError, ForgeError


def stack_samples(source: SampleSource, indices: NDArray[np.int64]) -> Arrays:
    """Samples `indices` (R,) one by one, stacked to (R, ...). Keys and shapes must agree."""
    return stack([source[int(index)] for index in indices], indices)


def stack(samples: Sequence[Mapping[str, Any]], indices: NDArray[np.int64]) -> Arrays:
    """Samples stacked to (R, ...); `indices` (R,) are their numbers, for messages.

    Raises:
        DataError: keys or shapes differ.
    """
    keys = list(samples[0])
    for index, sample in zip(indices, samples, strict=True):
        if list(sample) != keys:
            raise DataError(f"sample {index} has {sorted(sample)}, sample {indices[0]} has {sorted(keys)}")
    try:
        return {key: np.stack([np.asarray(sample[key]) for sample in samples]) for key in keys}
    except ValueError as error:
        shapes = {key: sorted({np.shape(sample[key]) for sample in samples}) for key in keys}
        raise DataError(f"samples of different shapes cannot form a batch: {shapes}") from error


def read_source(source: SampleSource, indices: NDArray[np.int64], name: str = "data") -> Arrays:
    """Samples `indices` (R,) of one source, through its own `batch` where it has one.

    Raises:
        DataError: naming the source and, where it can be found out, the sample that cannot be read.
    """
    batch = getattr(source, "batch", None)
    try:
        if batch is None:
            return stack_samples(source, indices)
        arrays: Arrays = batch(indices)
        return arrays
    except ForgeError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise DataError(f"source {name}: cannot read {_culprit(source, indices)}: {what}") from error


def _culprit(source: SampleSource, indices: NDArray[np.int64]) -> str:
    """The first of some samples that fails on its own, else all of them, in words."""
    if hasattr(source, "__getitem__"):
        for index in indices:
            try:
                source[int(index)]
            except Exception:
                return f"sample {index}"
    return f"samples {', '.join(map(str, indices[:8]))}" + (", ..." if len(indices) > 8 else "")


def read_rows(
    sources: Sequence[SampleSource],
    which: NDArray[np.int64],
    indices: NDArray[np.int64],
    names: Sequence[str] = (),
) -> Arrays:
    """Row r is sample `indices[r]` of source `which[r]`; both (R,). Adds `sources` (R,) int64.

    Args:
        names: of the sources, for messages.
    """
    names = names or [str(number) for number in range(len(sources))]
    if len(sources) == 1:
        return {**read_source(sources[0], indices, names[0]), "sources": which}
    places = {int(number): np.flatnonzero(which == number) for number in np.unique(which)}
    parts = {n: read_source(sources[n], indices[rows], names[n]) for n, rows in places.items()}
    if any("documents" in part for part in parts.values()):
        parts = {n: _with_documents(part) for n, part in parts.items()}
    blanks = {key: value for source in sources for key, value in getattr(source, "blanks", {}).items()}
    if blanks:  # also where only others are read, so that all ranks have the same keys
        parts = {n: _with_blanks(part, blanks) for n, part in parts.items()}
    if any("valid" in part for part in parts.values()):
        parts = {n: _with_valid(part) for n, part in parts.items()}
    first = next(iter(parts))
    form = _form(parts[first])
    rows = {k: np.empty((len(which), *v.shape[1:]), dtype=v.dtype) for k, v in parts[first].items()}
    for number, part in parts.items():
        if _form(part) != form:
            raise DataError(
                f"source {names[number]} gives {_form(part)} a sample, source {names[first]} gives {form}",
                "sources of one mixture need the same keys and shapes",
            )
        for key, value in part.items():
            rows[key][places[number]] = value
    return {**rows, "sources": which}


def _with_documents(part: Arrays) -> Arrays:
    """The same rows; each is one document where the source does not tell."""
    if "documents" in part or "tokens" not in part:
        return part
    return {**part, "documents": np.zeros(part["tokens"].shape, dtype=np.int32)}


def _with_blanks(part: Arrays, blanks: Arrays) -> Arrays:
    """The same rows, with what samples of other sources have besides as they say it for a sample without."""
    rows = len(next(iter(part.values())))
    more = {k: np.broadcast_to(v, (rows, *v.shape)) for k, v in blanks.items() if k not in part}
    return {**part, **more}


def _with_valid(part: Arrays) -> Arrays:
    """The same rows; no token is padding where the source does not tell."""
    if "valid" in part or "tokens" not in part:
        return part
    return {**part, "valid": np.ones(part["tokens"].shape, dtype=bool)}


def _form(part: Arrays) -> dict[str, tuple[int, ...]]:
    """Shape of a sample by key."""
    return {key: value.shape[1:] for key, value in sorted(part.items())}


def check_rows(arrays: Arrays, vocab_size: int, names: Sequence[str]) -> None:
    """`check_tokens` of rows from several sources; the error names the source."""
    try:
        check_tokens(arrays["tokens"], vocab_size)
    except DataError:
        wrong = (arrays["tokens"] < 0) | (arrays["tokens"] >= vocab_size)
        row = int(wrong.reshape(len(wrong), -1).any(axis=1).argmax())
        token = int(arrays["tokens"][row][wrong[row]][0])
        raise vocabulary_error(token, vocab_size, f"source {names[arrays['sources'][row]]}") from None


def check_tokens(tokens: NDArray[np.int64], vocab_size: int) -> None:
    """Refuse ids that the embedding does not have; on a GPU they would end in a device assertion."""
    # seen as unsigned, a negative id is a huge one
    if tokens.size and int(tokens.view(np.uint64).max()) >= vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise vocabulary_error(int(wrong), vocab_size)


def vocabulary_error(token: int, vocab_size: int, name: str = "data") -> DataError:
    """The error for a token id that does not fit."""
    return DataError(
        f"{name}: token id {token} does not fit model.vocab_size = {vocab_size}",
        f"set model.vocab_size to at least {token + 1}, or leave it out to take the tokenizer's"
        if token >= 0
        else "token ids are not negative",
    )


def to_batch(arrays: Arrays, pin: bool = False) -> Batch:
    """The same arrays as CPU tensors, sharing memory unless they are pinned for an asynchronous copy."""
    batch: dict[str, Any] = {key: torch.from_numpy(value) for key, value in arrays.items()}
    return {key: value.pin_memory() for key, value in batch.items()} if pin else batch


def to_micro_batches(arrays: Arrays, rows: int, pin: bool = False) -> list[Batch]:
    """Micro-batches of `rows` rows each; views of arrays (n * rows, ...)."""
    starts = range(0, len(arrays["sources"]), rows)
    if pin:
        whole = to_batch(arrays, pin)
        return [{key: value[start : start + rows] for key, value in whole.items()} for start in starts]
    # numpy cuts views several times faster than torch, which shows in a step of a few milliseconds
    return [to_batch({key: value[start : start + rows] for key, value in arrays.items()}) for start in starts]
