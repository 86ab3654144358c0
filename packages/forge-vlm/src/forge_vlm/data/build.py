"""What every source does with the samples it has found. Imports no torch."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import attrs
import numpy as np

from forge_core.data.source import SourceSpec
from forge_core.data.tokenizer import fingerprint_of
from forge_core.errors import DataError
from forge_core.files import user_path
from forge_vlm.data.files import LOOKED_AT, Files
from forge_vlm.data.keys import OddKeys, tell_odd_keys
from forge_vlm.data.options import SampleOptions
from forge_vlm.data.passing import Passing
from forge_vlm.data.patches import looks_up
from forge_vlm.data.picture import MEND, Footage, Frame, measure, read_together
from forge_vlm.data.record import Found, Rejected
from forge_vlm.data.remembered import SMALL, Remembered, digest_of
from forge_vlm.data.rows import Sample, Where
from forge_vlm.data.source import ImageTextSource, SampleLayout, image_shape
from forge_vlm.data.stored import Columns, ColumnWriter, PictureCodec, Samples, file_of
from forge_vlm.data.telling import Progress, tell_blind

_SCALE = 1 << 32
_log = logging.getLogger("forge.data")
_made: WeakValueDictionary[tuple[int, str], Columns] = WeakValueDictionary()
"""By configuration and key: the splits of a source share their samples."""


@attrs.frozen(kw_only=True)
class Origin:
    """Where the samples of a source come from.

    Attributes:
        name: in messages. root: folder that paths of images are told from.
        key: see `key_of`. codec: of pictures that are no files; None: all are.
        pictures_by: how samples come to images, told where none has any; "": that is as it should be.
        where: see `RowBuilder`. total: how many samples there are, about; None: nobody knows.
        passing: where what lays samples out notes errors that pass. keys: where it notes odd ones.
    """

    name: str
    root: Path
    key: str | None
    codec: PictureCodec | None = None
    pictures_by: str = ""
    where: Where | None = None
    total: Callable[[], int] | None = None
    passing: Passing = attrs.field(factory=Passing)
    keys: OddKeys = attrs.field(factory=OddKeys)


def samples_of(
    spec: SourceSpec, options: SampleOptions, found: Iterable[Found | Rejected], origin: Origin
) -> ImageTextSource:
    """The samples of one split.

    What is held out is decided by the first image of a sample, or its text, so that questions about one image
    are on one side.

    Args:
        found: all samples, which are laid out as they come; not looked at where they are remembered.

    Raises:
        DataError: a sample that is not right; no sample in the split; images that are not there, where that
            is an error.
    """
    shape = image_shape(spec)
    measured, lenient = origin.passing.noting(measure), options.unreadable == "mask"
    lay = SampleLayout(spec, shape, options.too_long, measured, lenient)
    codec = origin.codec or PictureCodec(origin.root)
    columns, files = _columns(spec, origin, codec, found, lay)
    samples = Samples(columns, numbers_of(spec, columns), codec, lay.lay)
    samples.tell(spec, options.too_long)
    if spec.split != "holdout":
        tell_odd_keys(spec.name, len(columns), columns.facts.get("odd_keys", []))
    if options.unreadable == "error":
        check_files(spec, columns, files, codec, origin.where)
    if origin.pictures_by and not columns.facts["pictures"] and len(samples) and spec.split != "holdout":
        tell_blind(spec.name, origin.name, origin.pictures_by)
    if not samples:
        how = "a larger" if spec.split == "holdout" else "a smaller"
        hint = f"give more data, or {how} data.holdout than {spec.holdout:g}" if spec.split != "all" else ""
        raise DataError(f"{spec.name}: {origin.name} leaves no sample for the split {spec.split}", hint)
    about = (options, files.content(), columns.facts["groups"], fingerprint_of(spec.tokenizer))
    return ImageTextSource(
        spec,
        shape,
        samples,
        partial(read_together, geometry=shape.geometry),
        about=repr(about),
        pack=options.pack,
        mask_unreadable=lenient,
        where=origin.where,
    )


def numbers_of(spec: SourceSpec, columns: Columns) -> Any:
    """Which samples belong to the split, (n,) int64."""
    if spec.split == "all":
        return np.arange(len(columns))
    held = columns.arrays["groups"] < spec.holdout * _SCALE
    return np.flatnonzero(held if spec.split == "holdout" else ~held)


def _columns(
    spec: SourceSpec,
    origin: Origin,
    codec: PictureCodec,
    found: Iterable[Found | Rejected],
    lay: SampleLayout,
) -> tuple[Columns, Files]:
    """All samples: of another split, remembered, or made."""
    shared = (id(spec.config), origin.key or "")
    known = _made.get(shared) if origin.key else None
    if known is not None:
        return known, known.files(codec.root)
    with Remembered(spec, origin.key) as cache:
        columns, files = _read(cache, codec) or make_columns(spec, origin, codec, found, lay, cache)
    _made[shared] = columns
    return columns, files


def _read(cache: Remembered, codec: PictureCodec) -> tuple[Columns, Files] | None:
    """What is remembered and its files, if none has changed whose size was looked up."""
    columns = cache.read()
    if columns is None:
        return None
    files, state = columns.files(codec.root), columns.facts["state"]
    return (columns, files) if not state or state == files.state() else None


def make_columns(
    spec: SourceSpec,
    origin: Origin,
    codec: PictureCodec,
    found: Iterable[Found | Rejected],
    lay: SampleLayout,
    cache: Remembered,
) -> tuple[Columns, Files]:
    """Lay all samples out, and remember them where they are many."""
    writer, groups = ColumnWriter(codec), hashlib.blake2b(digest_size=16)
    pictures = 0
    looked_up = looks_up(lay.shape)
    told = Progress(spec.name, origin.total)
    for each in found:
        if len(writer) == SMALL:
            cache.hold()
            other = _read(cache, codec)
            if other is not None:
                return other
        if isinstance(each, Rejected):
            writer.add(no_sample(each.name), number_of(each.name))
            continue
        for picture in each[2]:
            pictures += 1
            looked_up = looked_up or isinstance(picture, Frame | Footage)
            if file_of(picture) is None:
                groups.update(group_of(picture).encode("utf-8", "surrogatepass"))
        try:
            sample = lay(*each)
            if origin.passing.first and not lay.lenient:
                # laid out as the smallest picture, it would not fit its place as soon as it can be read
                raise DataError(origin.passing.first, MEND)
        except DataError as error:
            raise _placed(error, origin, each) from error
        writer.add(sample, number_of(group_of(each[2][0]) if each[2] else repr(each[1])))
        told(len(writer))
    columns, files = _finished(writer, codec, pictures, groups.hexdigest(), looked_up)
    columns = attrs.evolve(columns, facts={**columns.facts, "odd_keys": origin.keys.facts()})
    if origin.passing.first:
        _log.warning("%s: samples are laid out again at the next start: %s", spec.name, origin.passing.first)
    elif len(writer) > SMALL:
        cache.write(columns)
    return columns, files


def _placed(error: DataError, origin: Origin, sample: Found) -> DataError:
    """What is wrong with a sample, and where it is."""
    name, _, pictures, _ = sample
    place = origin.where(name, pictures) if origin.where else f"{origin.name}: {name}"
    return DataError(f"{place}: {error.message.removeprefix(f'{name} ')}", error.hint)


def _finished(
    writer: ColumnWriter, codec: PictureCodec, pictures: int, groups: str, looked_up: bool
) -> tuple[Columns, Files]:
    arrays = writer.arrays()
    facts = {"looked_at": writer.looked_at(LOOKED_AT), "pictures": pictures, "groups": groups, "state": ""}
    columns = Columns(arrays, digest_of(arrays), facts)
    files = columns.files(codec.root)
    if looked_up:
        facts["state"] = files.state()
    return columns, files


def no_sample(name: str) -> Sample:
    """What stands for one that is left out."""

    def lay(content: bytes, places: tuple[int, ...]) -> Any:
        raise AssertionError("nothing of it is laid out")

    return Sample(
        name=name,
        parts=b"",
        places=(),
        lay=lay,
        tokens=0,
        kept=0,
        largest=0,
        images=(),
        dropped=True,
        wrong=True,
    )


def number_of(about: str) -> int:
    """A number below 2 ** 32 that decides the split of what is called `about`."""
    digest = hashlib.blake2b(about.encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def held_out(about: str, share: float) -> bool:
    """Whether what is called `about` belongs to the share kept for evaluation."""
    return number_of(about) < share * _SCALE


def group_of(picture: Any) -> str:
    """What a picture has in common with others of its kind: the name of its file."""
    return str(picture.clip if isinstance(picture, Frame | Footage) else getattr(picture, "group", picture))


def check_files(
    spec: SourceSpec, columns: Columns, files: Files, codec: PictureCodec, where: Where | None = None
) -> None:
    """Refuse files that are not there, given with the sample that names them.

    Raises:
        DataError: naming the first.
    """
    missing = files.missing
    if len(missing):
        path = files.names[int(missing[0])]
        name, pictures, _ = columns.about(int(columns.arrays["file_sample"][missing[0]]))
        blobs = [blob for told in pictures if (blob := file_of(codec.picture(told))) is not None]
        there = [blob for blob in blobs if codec.path_of(blob) == path]
        few = f"{len(missing):,} images are not there, first"
        few = "1 image is not there:" if len(missing) == 1 else few
        of = where(name, there) if where else name
        raise DataError(
            f"{spec.name}: {few} {codec.root / path} of {of}", 'mend the paths, or set unreadable = "mask"'
        )


def laid_samples(found: Iterable[Found], codec: PictureCodec, lay: SampleLayout) -> Samples:
    """Samples that are all of the split, laid out in memory; what is odd about them is told.

    Args:
        codec: of their pictures.
    """
    writer = ColumnWriter(codec)
    for each in found:
        writer.add(lay(*each), 0)
    columns, _ = _finished(writer, codec, 0, "", looked_up=False)
    samples = Samples(columns, np.arange(len(columns)), codec, lay.lay)
    samples.tell(lay.spec, lay.too_long)
    return samples


def path_of(spec: SourceSpec, what: str) -> Path:
    """`spec.path`.

    Raises:
        DataError: there is none; `what` says what it should be.
    """
    if spec.path is None:
        raise DataError(f"data.path: the source {spec.name!r} needs the path of {what}")
    return user_path(spec.path)
