"""From the rows of a unit to tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from forge_core.data.chat import encode_chat, template_of
from forge_core.data.prepare.job import Job, Unit
from forge_core.data.prepare.readers import reader_of
from forge_core.errors import DataError

Encoded = tuple[NDArray[np.generic], NDArray[np.uint8] | None]
"""Tokens (n,) of a document, and which of them are learnt, (n,); None: all."""


def encode_unit(unit: Unit, job: Job) -> Iterator[Encoded]:
    """The documents of a unit, in order; those without text are left out.

    Raises:
        DataError: naming file and row.
    """
    if job.template is not None:
        yield from _chats(unit, job)
        return
    for tokens in job.load_tokenizer().encode_documents(texts(unit, job)):
        yield tokens, None


def texts(unit: Unit, job: Job) -> Iterator[bytes]:
    """The text of each document that has any."""
    reader = reader_of(job.kind)
    for part in unit:
        for number, value in reader.rows(part, job):
            text = value.encode("utf-8", "replace") if isinstance(value, str) else value
            if not isinstance(text, bytes | None):
                raise DataError(
                    f"{reader.where(part.path, number)}: the field {job.field!r} is "
                    f"{type(value).__name__}, not text"
                )
            if text:
                yield text


def _chats(unit: Unit, job: Job) -> Iterator[Encoded]:
    tokenizer = job.load_tokenizer()
    assert job.template is not None
    template = template_of(job.template, tokenizer)
    reader = reader_of(job.kind)
    for part in unit:
        for number, messages in reader.rows(part, job):
            try:
                tokens, learnt = encode_chat(messages, template, tokenizer)
            except DataError as error:
                place = reader.where(part.path, number)
                raise DataError(f"{place}: {error.message}", error.hint) from error
            yield np.array(tokens), np.array(learnt, dtype=np.uint8)
