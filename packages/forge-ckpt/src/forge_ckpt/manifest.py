"""`manifest.json`: what a checkpoint consists of, with sizes and checksums. Imports no torch.

It is written last, so that a folder with a manifest is whole unless something happened to it afterwards. Its
text is canonical and holds its own checksum: no byte of it can change unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import xxhash

from forge_ckpt.errors import DamagedError
from forge_ckpt.layout import MANIFEST

FORMAT = 1


@attrs.frozen
class FileSum:
    """Size in bytes and XXH3 (128 bits, hexadecimal) of a file."""

    size: int
    xxh3: str


@attrs.frozen(kw_only=True)
class Manifest:
    """A checkpoint as a whole.

    Attributes:
        step: the update after which it was saved.
        kind: scheduled, initial, final or emergency.
        serial: number of the save among all of its folder; a later save has a larger one.
        milestone: the save schedule asked for it as one to keep.
        world_size: ranks that wrote it.
        metrics: what retention may rank by, e.g. {"eval/loss": 2.1}.
        saved_at: UTC, ISO 8601.
        files: every other file by its path, with size and checksum.
    """

    step: int
    kind: str
    serial: int
    world_size: int
    saved_at: str
    files: Mapping[str, FileSum]
    milestone: bool = False
    metrics: Mapping[str, float] = attrs.Factory(dict)

    def to_text(self) -> str:
        """The file, ending with the checksum of all before it."""
        body = attrs.asdict(self)
        body["files"] = {path: [s.size, s.xxh3] for path, s in sorted(self.files.items())}
        return _canonical({"format": FORMAT, **body})

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry.size for entry in self.files.values())


def _canonical(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, indent=1, sort_keys=True)
    checksum = xxhash.xxh3_128_hexdigest(text.encode())
    return f'{text[:-2]},\n "xxh3": "{checksum}"\n}}\n'


def parse_manifest(data: bytes) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        DamagedError: a byte changed, or it is of a later format.
    """
    try:
        body = json.loads(data)
        body.pop("xxh3")
        same = _canonical(body).encode() == data
        form = body.pop("format")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{MANIFEST} cannot be read: {error}", MANIFEST) from error
    if not same:
        raise DamagedError(f"{MANIFEST} is not what was written", MANIFEST)
    if form > FORMAT:
        raise DamagedError(f"{MANIFEST} has format {form}; this release reads up to {FORMAT}", MANIFEST)
    body["files"] = {path: FileSum(size, xxh3) for path, (size, xxh3) in body["files"].items()}
    known = {field.name for field in attrs.fields(Manifest)}
    return Manifest(**{key: value for key, value in body.items() if key in known})


def checksum(*parts: bytes | bytearray | memoryview) -> str:
    """XXH3 of the parts one after another, 128 bits in hexadecimal."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def sums(files: Iterable[tuple[str, bytes]]) -> dict[str, FileSum]:
    """Sizes and checksums of files at hand."""
    return {path: FileSum(len(data), checksum(data)) for path, data in files}
