"""What is in a tar, by offset, so that nothing has to be unpacked. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import logging
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from forge_core.data.cache import cache_folder, locked, make_folder, write_json
from forge_core.data.source import SourceSpec
from forge_core.errors import DataError
from forge_vlm.data.picture import Blob

TEXTS = ("json", "txt")
"""Suffixes of members that are kept with the index."""
_BLOCK = 512
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"(\xb5": "zstd"}
_log = logging.getLogger("forge.data")


@attrs.frozen(kw_only=True)
class Member:
    """A file in a tar.

    Attributes:
        suffix: what follows the first dot of its name, in lower case. offset, size: of its content in bytes.
        text: its content, of `TEXTS`.
    """

    suffix: str
    offset: int
    size: int
    text: str | None = None

    @property
    def kind(self) -> str:
        """The last part of its suffix."""
        return self.suffix.rpartition(".")[2]

    def blob(self, tar: Path, key: str) -> Blob:
        """Where it is; `tar` holds it as part of the sample `key`."""
        return Blob(tar, f"{key}.{self.suffix}", self.offset, self.size)


@attrs.frozen(kw_only=True)
class Group:
    """Members that are one sample: their names are equal up to the first dot."""

    key: str
    members: tuple[Member, ...]


def read_groups(tar: Path) -> Iterator[Group]:
    """The samples of a tar, in their order. Members without a suffix, hidden ones and folders are left out.

    Raises:
        DataError: it is compressed, broken or cut short; a sample that comes twice, or has a member twice.
    """
    seen: set[str] = set()
    key, members = "", list[Member]()
    for name, member in _members(tar):
        if name != key:
            if members:
                yield Group(key=key, members=tuple(members))
            if name in seen:
                raise DataError(
                    f"{tar}: the sample {name} comes twice, with other samples between",
                    "members of a sample stand together; two samples need two names",
                )
            seen.add(name)
            key, members = name, []
        if any(other.suffix == member.suffix for other in members):
            raise DataError(f"{tar}: the sample {name} has two members {name}.{member.suffix}")
        members.append(member)
    if members:
        yield Group(key=key, members=tuple(members))


def _members(tar: Path) -> Iterator[tuple[str, Member]]:
    """Name of the sample and member, for every file in a tar."""
    try:
        with tar.open("rb") as file:
            _refuse_compressed(tar, file.read(2))
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for found in archive:
                    folder, slash, name = found.name.rpartition("/")
                    key, _, suffix = name.partition(".")
                    if not found.isreg() or not key or not suffix:
                        continue
                    suffix = suffix.lower()
                    text = None
                    if suffix.rpartition(".")[2] in TEXTS:
                        text = _text(tar, found, file)
                    offset = found.offset_data
                    yield (
                        folder + slash + key,
                        Member(suffix=suffix, offset=offset, size=found.size, text=text),
                    )
                _check_end(tar, file, archive.offset)
    except tarfile.TarError as error:
        raise DataError(f"the tar {tar} is broken or cut short: {error}") from error
    except OSError as error:
        raise DataError(f"cannot read the tar {tar}: {error.strerror or error}") from error


def _refuse_compressed(tar: Path, start: bytes) -> None:
    how = _COMPRESSED.get(start)
    if how:
        message = f"{tar} is compressed with {how}, so that nothing in it can be read by offset"
        raise DataError(message, "uncompress it once; images are compressed already")


def _check_end(tar: Path, file: Any, offset: int) -> None:
    """tarfile takes what it cannot read for the end; a tar ends with a block of zeros."""
    file.seek(offset)
    if file.read(_BLOCK) != bytes(_BLOCK):
        raise DataError(
            f"the tar {tar} is broken or cut short at byte {offset}: it lacks the mark of its end"
        )


def _text(tar: Path, found: tarfile.TarInfo, file: Any) -> str:
    before = file.tell()
    file.seek(found.offset_data)
    content = file.read(found.size)
    file.seek(before)
    try:
        return str(content, "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{tar}: {found.name} is no text in UTF-8: {error}") from error


def groups_of(tar: Path, spec: SourceSpec) -> list[Group]:
    """`read_groups`, remembered in the cache folder, for path, size and time of change of the tar, with a
    checksum. Processes that ask for the same wait for the first of them.

    Raises:
        DataError: see `read_groups`; there is no such file.
    """
    if not tar.is_file():
        raise DataError(f"{spec.name}: there is no tar {tar}")
    status = tar.stat()
    about = f"1/{tar.resolve()}/{status.st_size}/{status.st_mtime_ns}"
    key = hashlib.blake2b(about.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    folder = make_folder(cache_folder(spec.cache_dir) / "webdataset")
    known = folder / f"{key}.json"
    with locked(folder / f"{key}.lock"):
        found = _remembered(known)
        if found is None:
            _log.info("%s: looking up what is in %s once", spec.name, tar)
            found = list(read_groups(tar))
            content = [attrs.asdict(group) for group in found]
            write_json(known, {"tar": str(tar), "checksum": _checksum(content), "groups": content})
    return found


def _remembered(known: Path) -> list[Group] | None:
    """What a file of the cache says, if it is whole."""
    if not known.is_file():
        return None
    try:
        content = json.loads(known.read_bytes())
        if content["checksum"] == _checksum(content["groups"]):
            return [
                Group(key=each["key"], members=tuple(Member(**member) for member in each["members"]))
                for each in content["groups"]
            ]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    _log.warning("%s is damaged, and made again", known)
    return None


def _checksum(content: Any) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
