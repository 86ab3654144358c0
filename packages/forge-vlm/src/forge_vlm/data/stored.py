"""Samples in columns: in memory, or in a file of the cache that all processes map. Imports no torch."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_core.data.source import SourceSpec
from forge_vlm.data.asked import Asked
from forge_vlm.data.files import Files
from forge_vlm.data.layout import Laid
from forge_vlm.data.picture import Blob, Footage, Frame
from forge_vlm.data.pieces import Piece
from forge_vlm.data.rows import Sample
from forge_vlm.data.telling import NAMED, Census, Told

CUT, SILENT, DROPPED, WRONG = 1, 2, 4, 8
"""Bits of the column `kinds`."""
_TYPES = {
    "sizes": "<i4",
    "largest": "<i4",
    "kinds": "|u1",
    "groups": "<u4",
    "choices": "<i4",
    "parts": "|u1",
    "parts_end": "<i8",
    "places": "<i4",
    "places_end": "<i8",
    "about": "|u1",
    "about_end": "<i8",
    "file_names": "|u1",
    "file_sample": "<i8",
}
"""Columns and the types of their numbers; those that end in `_end` say where a sample ends in another."""
_CODES = {"<i4": "i", "|u1": "B", "<u4": "I", "<i8": "q"}


@attrs.frozen
class PictureCodec:
    """Pictures as JSON and back.

    Attributes:
        root: folder from which the paths of files are told.
        pack, unpack: of a picture that is no file, as a list without its kind.
    """

    root: Path
    pack: Callable[[Any], list[Any]] = attrs.field(default=lambda picture: [picture])
    unpack: Callable[..., Any] = attrs.field(default=lambda picture: picture)

    def told(self, picture: Any) -> Any:
        """A picture as JSON."""
        if isinstance(picture, Piece):
            return ["piece", self.told(picture.picture), picture.number, picture.count]
        if isinstance(picture, Frame):
            return ["frame", self.told(picture.clip), picture.time, picture.height, picture.width]
        if isinstance(picture, Footage):
            clip = self.told(picture.clip)
            return ["clip", clip, picture.times, picture.seconds, picture.height, picture.width]
        if not isinstance(picture, Blob):
            return ["own", *self.pack(picture)]
        path = self.path_of(picture)
        if picture.size is None and path == picture.name:
            return path
        return ["file", picture.name, path, picture.offset, picture.size]

    def picture(self, told: Any) -> Any:
        """The way back."""
        if isinstance(told, str):
            return Blob(self.root / told, told)
        kind, *rest = told
        if kind == "file":
            name, path, offset, size = rest
            return Blob(self.root / path, name, offset, size)
        if kind == "own":
            return self.unpack(*rest)
        inner = self.picture(rest[0])
        if kind == "piece":
            return Piece(inner, *rest[1:])
        if kind == "frame":
            return Frame(inner, *rest[1:])
        times, seconds, height, width = rest[1:]
        return Footage(clip=inner, times=tuple(times), seconds=seconds, height=height, width=width)

    def path_of(self, blob: Blob) -> str:
        """From `root` on, where it lies below."""
        path, root = str(blob.path), f"{self.root}/"
        return path[len(root) :] if path.startswith(root) else path


def file_of(picture: Any) -> Blob | None:
    """The file that a picture is in, if it is in one."""
    if isinstance(picture, Piece):
        picture = picture.picture
    found = picture.clip if isinstance(picture, Frame | Footage) else picture
    return found if isinstance(found, Blob) else None


@attrs.frozen(eq=False)
class Columns:
    """All samples of a source, of every split, and those that were left out.

    Attributes:
        arrays: by name, see `_TYPES`. digest: of all of them.
        facts: `looked_at`: see `Files`; `pictures`: how many were named; `groups`: changes with what pictures
            that are no files are called; `state`: see `Files.state`, "" where no size was looked up.
    """

    arrays: Mapping[str, NDArray[Any]]
    digest: str
    facts: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.arrays["kinds"])

    def part(self, name: str, number: int) -> NDArray[Any]:
        """What the sample `number` has of a column of many values each."""
        ends = self.arrays[f"{name}_end"]
        return self.arrays[name][ends.item(number - 1) if number else 0 : ends.item(number)]

    def about(self, number: int) -> tuple[str, Any, Any]:
        """Name, pictures and questions of a sample, as JSON has them."""
        name, pictures, asked = json.loads(self.part("about", number).tobytes())
        return name, pictures, asked

    def files(self, root: Path) -> Files:
        """The files that pictures are in."""
        text = str(self.arrays["file_names"].tobytes(), "utf-8", "surrogatepass")
        return Files(root, text.split("\0") if text else [], self.facts["looked_at"])


class ColumnWriter:
    """Collects samples.

    Args:
        codec: of their pictures.
    """

    def __init__(self, codec: PictureCodec) -> None:
        self.codec = codec
        self._columns: dict[str, Any] = {
            name: bytearray() if name in ("parts", "about") else array(_CODES[kind])
            for name, kind in _TYPES.items()
        }
        self._files: dict[str, int] = {}
        self._blobs: dict[tuple[int, int], int | None] = {}

    def __len__(self) -> int:
        return len(self._columns["kinds"])

    def add(self, sample: Sample, group: int) -> None:
        """Append a sample; `group` decides its split."""
        c = self._columns
        kept = not sample.dropped
        c["sizes"].extend((sample.tokens, sample.kept, sample.patches) if kept else (0, 0, 0))
        c["largest"].append(sample.largest if kept else 0)
        c["kinds"].append(
            sample.cut * CUT | sample.silent * SILENT | sample.dropped * DROPPED | sample.wrong * WRONG
        )
        c["groups"].append(group)
        asked = None
        if sample.asked is not None:
            asked = [sample.asked.answers, sample.asked.choices, sample.asked.right]
        c["choices"].append(0 if sample.asked is None else len(sample.asked.choices))
        if kept:
            c["parts"] += sample.parts
            c["places"].extend(sample.places)
        for picture in sample.images:
            self._file(picture)
        told = [self.codec.told(picture) for picture in sample.images] if kept else []
        c["about"] += json.dumps([sample.name, told, asked if kept else None]).encode()
        for name in ("parts", "places", "about"):
            c[f"{name}_end"].append(len(c[name]))

    def _file(self, picture: Any) -> None:
        blob = file_of(picture)
        if blob is None:
            return
        path = self.codec.path_of(blob)
        number = self._files.get(path)
        if number is None:
            number = self._files[path] = len(self._files)
            self._columns["file_sample"].append(len(self) - 1)
        self._blobs[number, blob.offset] = blob.size

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The columns."""
        self._columns["file_names"] = "\0".join(self._files).encode("utf-8", "surrogatepass")
        found = {name: np.frombuffer(self._columns[name], kind) for name, kind in _TYPES.items()}
        return {**found, "sizes": found["sizes"].reshape(-1, 3)}

    def looked_at(self, most: int) -> list[tuple[int, int, int | None]]:
        """File, offset and size of the stretches whose content is looked at, spread over all."""
        blobs = list(self._blobs.items())
        chosen = sorted({round(k * (len(blobs) - 1) / (most - 1)) for k in range(most)}) if blobs else []
        return [(*blobs[number][0], blobs[number][1]) for number in chosen]


class Samples(Sequence[Sample]):
    """Some of the samples of `Columns`, made as they are asked for.

    Args:
        columns: all. numbers: (n,) of those that are meant, rising; of `columns`.
        codec: of their pictures. lay: lays them out.
    """

    def __init__(
        self,
        columns: Columns,
        numbers: NDArray[np.int64],
        codec: PictureCodec,
        lay: Callable[[bytes, tuple[int, ...]], Laid],
    ) -> None:
        kinds = columns.arrays["kinds"][numbers]
        left = (kinds & DROPPED) > 0
        self.columns, self.codec, self.lay = columns, codec, lay
        self.left_out = numbers[left]
        self.numbers = numbers[~left]
        # each goes with the next sample that is there, those at the end with the last one
        at = np.searchsorted(self.numbers, self.left_out).clip(max=max(len(self.numbers) - 1, 0))
        self._before = np.bincount(at, minlength=len(self.numbers))

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, at: int) -> Sample: ...

    @overload
    def __getitem__(self, at: slice) -> list[Sample]: ...

    def __getitem__(self, at: int | slice) -> Sample | list[Sample]:
        if isinstance(at, slice):
            return [self._sample(number) for number in range(len(self))[at]]
        return self._sample(range(len(self))[at])

    def __iter__(self) -> Iterator[Sample]:
        return (self._sample(at) for at in range(len(self)))

    def column(self, name: str) -> NDArray[Any]:
        """One of the columns with a value or a row a sample."""
        return self.columns.arrays[name][self.numbers]

    def count(self, kind: int) -> int:
        """How many are of a kind."""
        return int(np.count_nonzero(self.column("kinds") & kind))

    def why_left_out(self) -> dict[str, int]:
        """How many were left out, by the reason."""
        wrong = int(np.count_nonzero(self.columns.arrays["kinds"][self.left_out] & WRONG))
        found = {"left out as too long": len(self.left_out) - wrong}
        return {**found, "left out as no samples": wrong} if wrong else found

    def tell(self, spec: SourceSpec, too_long: str) -> None:
        """Say what is odd about them, to the log."""
        census = Census(spec, too_long)
        chosen = np.union1d(self.numbers, self.left_out)
        kinds = self.columns.arrays["kinds"][chosen]
        census.total = len(chosen)
        for kind, bit in (("cut", CUT), ("silent", SILENT), ("wrong", WRONG)):
            found = chosen[(kinds & bit) > 0]
            names = [self.columns.about(int(number))[0] for number in found[:NAMED]]
            census.told[kind] = Told(len(found), names)
        census.tell()

    def _sample(self, at: int) -> Sample:
        columns, number = self.columns, self.numbers.item(at)
        name, pictures, asked = columns.about(number)
        tokens, kept, patches = columns.arrays["sizes"][number].tolist()
        kind = columns.arrays["kinds"].item(number)
        return Sample(
            name=name,
            parts=columns.part("parts", number).tobytes(),
            places=tuple(columns.part("places", number).tolist()),
            lay=self.lay,
            tokens=tokens,
            kept=kept,
            largest=columns.arrays["largest"].item(number),
            images=tuple(map(self.codec.picture, pictures)),
            patches=patches,
            asked=None if asked is None else _asked(*asked),
            cut=bool(kind & CUT),
            silent=bool(kind & SILENT),
            left_out=self._before.item(at),
        )


def _asked(answers: list[str], choices: list[list[int]], right: int) -> Asked:
    return Asked(answers=tuple(answers), choices=tuple(map(tuple, choices)), right=right)
