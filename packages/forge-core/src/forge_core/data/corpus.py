"""Which files a corpus consists of, which of them are held out, and their bytes."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import sysconfig
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import attrs

from forge_core.data.wording import counted
from forge_core.errors import DataError
from forge_core.files import user_path

SKIPPED_FOLDERS = {"__pycache__"}
LIBRARY_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
"""Folders of the standard library that are left out: what others installed, and tests full of test data."""
_SNIFFED = 8192
_log = logging.getLogger("forge.data")


@attrs.frozen(kw_only=True)
class Document:
    """One file, or one of its two parts when a file is cut in two.

    Attributes:
        path: the file.
        name: path relative to the corpus, with "/"; the same on every machine.
        size: of the file, in bytes.
        cut: 0 for the whole file; n: the bytes before about n; -n: the bytes from there on.
    """

    path: Path
    name: str
    size: int
    cut: int = 0

    def read(self) -> bytes:
        """Its bytes. A cut falls behind the next end of a line, in a file of one line between characters."""
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise unreadable(self.path, error) from error
        if not self.cut:
            return content
        at = content.find(b"\n", abs(self.cut)) + 1
        if at in (0, len(content)):
            at = abs(self.cut)
            while at > 1 and content[at] & 0xC0 == 0x80:  # inside a character of UTF-8
                at -= 1
        return content[:at] if self.cut > 0 else content[at:]


def unreadable(path: str | Path, error: OSError) -> DataError:
    """The error for a file or folder that cannot be read."""
    hint = "make it readable for this user (chmod, chown), or point data.path elsewhere"
    return DataError(f"cannot read {path}: {error.strerror or error}", hint)


def find_documents(path: str | None, patterns: Sequence[str], *, tell: bool = True) -> list[Document]:
    """Documents of a corpus, sorted by name.

    Args:
        path: a file (taken as it is) or a folder (searched with its sub-folders; hidden names and
            `__pycache__` are skipped, so are empty and binary files); None: the sources of Python's standard
            library.
        patterns: fnmatch patterns of the names of files in a folder.
        tell: how many files are binary; one of the splits of a source is enough.

    Raises:
        DataError: nothing there, nothing readable, or no text in it.
    """
    if path is None:
        return _library()
    root = user_path(path)
    try:
        is_folder = stat.S_ISDIR(root.stat().st_mode)
    except FileNotFoundError as error:
        hint = "a path starts from the current folder; without one, Python's own sources are used"
        raise DataError(f"data.path: there is no file or folder {root}", hint) from error
    except OSError as error:
        raise unreadable(root, error) from error
    if not is_folder:
        found = [Document(path=root, name=root.name, size=root.stat().st_size)]
    else:
        found = _without_binaries(root, _search(root, patterns, SKIPPED_FOLDERS), tell)
    found = [document for document in found if document.size]
    if not found:
        hint = "hidden, empty and binary files do not count"
        if is_folder:
            hint += "; files taken: " + " ".join(patterns) + " (data.text.patterns)"
        raise DataError(f"data.path: there is no text in {root}", hint)
    return found


def library_folder() -> Path:
    """Where the sources of Python's standard library are."""
    return Path(sysconfig.get_paths()["stdlib"])


def _library() -> list[Document]:
    root = library_folder()
    found = _search(root, ("*.py",), SKIPPED_FOLDERS | LIBRARY_SKIPPED) if root.is_dir() else []
    # _sysconfigdata is written by the build and holds the paths of the machine it ran on
    found = [d for d in found if d.size and not d.path.name.startswith("_sysconfigdata")]
    if not found:
        raise DataError(
            f"this Python comes without the sources of its standard library ({root})",
            "set data.path to a file or folder of text",
        )
    return found


def _search(root: Path, patterns: Sequence[str], skipped: set[str]) -> list[Document]:
    def refuse(error: OSError) -> None:
        raise unreadable(error.filename or root, error) from error

    found = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for name in files:
            if name.startswith(".") or not any(fnmatchcase(name, pattern) for pattern in patterns):
                continue
            path = Path(folder, name)
            try:
                status = path.stat()
            except OSError as error:
                raise unreadable(path, error) from error
            if stat.S_ISREG(status.st_mode):
                found.append(Document(path=path, name=path.relative_to(root).as_posix(), size=status.st_size))
    return sorted(found, key=lambda document: document.name)


def _without_binaries(root: Path, documents: list[Document], tell: bool) -> list[Document]:
    """Files with a zero byte near the start are pictures, archives and the like; git uses the same rule."""
    kept: list[Document] = []
    binary: list[Document] = []
    for document in documents:
        try:
            with document.path.open("rb") as file:
                (binary if b"\0" in file.read(_SNIFFED) else kept).append(document)
        except OSError as error:
            raise unreadable(document.path, error) from error
    if binary and tell:
        _log.warning(
            "left out %s in %s, the first is %s", counted(len(binary), "binary file"), root, binary[0].name
        )
    return kept


def split_documents(documents: Sequence[Document], holdout: float) -> tuple[list[Document], list[Document]]:
    """Documents to train on and documents held out, each in an order that puts unrelated ones side by side.

    The order is that of a hash of the name: it needs no seed, is the same everywhere, and a file that is
        added leaves most others where they are. In this order documents are held out while they fit into the
        share of all bytes; if not even one fits (one big file), the last part of the largest document is held
        out.

    Args:
        documents: at least one.
        holdout: share of the bytes, 0 <= holdout < 1; 0 holds nothing out.
    """
    ordered = sorted(
        documents, key=lambda d: hashlib.blake2b(d.name.encode("utf-8", "surrogateescape")).digest()
    )
    if holdout <= 0:
        return ordered, []
    budget = holdout * sum(document.size for document in ordered)
    train, held = [], []
    for document in ordered:
        if document.size <= budget:
            budget -= document.size
            held.append(document)
        else:
            train.append(document)
    if not held:
        largest = max(ordered, key=lambda d: d.size)
        at = largest.size - max(1, int(budget))
        if at > 0:
            train[train.index(largest)] = attrs.evolve(largest, cut=at)
            held.append(attrs.evolve(largest, cut=-at))
    return train, held
