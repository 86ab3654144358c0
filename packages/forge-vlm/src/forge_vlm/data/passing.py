"""Errors of the way to a file, which say nothing about what is in it. Imports no torch."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import attrs

from forge_core.errors import DataError

_LASTING = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)
)
"""What a path or a content is told to be; files that are not there are found out by their state."""


def passes(error: BaseException | None) -> bool:
    """Whether the same file may be read at the next try: it, or what it came of, is an error of the system
    (EIO, ESTALE, EACCES, ETIMEDOUT, too many open files, ...). What Pillow and FFmpeg find wrong with a
    content has no number of the system."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number in errno.errorcode and number not in _LASTING:
            return True
        error = error.__cause__ or error.__context__
    return False


@attrs.define
class Passing:
    """The first error that passes while samples are laid out, so that none of them are kept.

    Attributes:
        first: its message; "": there was none.
    """

    first: str = ""

    def note(self, error: DataError) -> bool:
        """Whether an error passes, which is kept in mind."""
        found = passes(error)
        if found:
            self.first = self.first or error.message
        return found

    def noting(self, measure: Callable[[Any], tuple[int, int]]) -> Callable[[Any], tuple[int, int]]:
        """`measure`, of which errors are noted."""

        def noted(picture: Any) -> tuple[int, int]:
            try:
                return measure(picture)
            except DataError as error:
                self.note(error)
                raise

        return noted
