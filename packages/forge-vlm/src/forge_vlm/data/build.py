"""What every source does with the samples it has found. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from forge_core.data.source import SourceSpec
from forge_core.data.tokenizer import fingerprint_of
from forge_core.errors import DataError
from forge_vlm.data.options import SampleOptions
from forge_vlm.data.picture import Blob, Footage, Frame, contents_of, measure, read_together
from forge_vlm.data.record import Found
from forge_vlm.data.rows import Where
from forge_vlm.data.source import ImageTextSource, SampleLayout, image_shape
from forge_vlm.data.telling import tell_blind

_SCALE = 1 << 32


def samples_of(
    spec: SourceSpec,
    options: SampleOptions,
    found: Iterable[Found],
    origin: str,
    *,
    pictures_by: str = "",
    where: Where | None = None,
) -> ImageTextSource:
    """The samples of one split.

    What is held out is decided by the first image of a sample, or its text, so that questions about one image
    are on one side.

    Args:
        found: all samples, which are laid out as they come. origin: where they are from, in messages.
        pictures_by: how samples come to images, told where none has any; "": that is as it should be.
        where: see `RowBuilder`.

    Raises:
        DataError: a sample that is not right; no sample in the split; images that are not there, where that
            is an error.
    """
    shape = image_shape(spec)
    files: dict[Blob, str] = {}
    groups = hashlib.blake2b(digest_size=16)

    seen = 0

    def mine() -> Iterator[Found]:
        nonlocal seen
        for sample in found:
            seen += len(sample[2])
            for picture in sample[2]:
                blob = blob_of(picture)
                if blob is None:
                    groups.update(group_of(picture).encode("utf-8", "surrogateescape"))
                else:
                    files.setdefault(blob, sample[0])
            if is_mine(spec, sample):
                yield sample

    lay = SampleLayout(spec, shape, options.too_long, measure)
    samples = [sample for each in mine() if (sample := lay(*each)) is not None]
    lay.tell()
    if options.unreadable == "error":
        check_files(spec, files, where)
    if pictures_by and not seen and lay.total and spec.split != "holdout":
        tell_blind(spec.name, origin, pictures_by)
    if not samples:
        raise DataError(f"{spec.name}: {origin} leaves no sample for the split {spec.split}")
    about = (options, contents_of(files), groups.hexdigest(), fingerprint_of(spec.tokenizer))
    return ImageTextSource(
        spec,
        shape,
        samples,
        partial(read_together, geometry=shape.geometry),
        about=repr(about),
        pack=options.pack,
        mask_unreadable=options.unreadable == "mask",
        left_out=lay.total - len(samples),
        where=where,
    )


def held_out(about: str, share: float) -> bool:
    """Whether what is called `about` belongs to the share kept for evaluation."""
    digest = hashlib.blake2b(about.encode("utf-8", "surrogateescape"), digest_size=4).digest()
    return int.from_bytes(digest, "big") < share * _SCALE


def is_mine(spec: SourceSpec, sample: Found) -> bool:
    """Whether a sample belongs to the split."""
    _, parts, pictures, _ = sample
    if spec.split == "all":
        return True
    about = group_of(pictures[0]) if pictures else repr(parts)
    return held_out(about, spec.holdout) == (spec.split == "holdout")


def group_of(picture: Any) -> str:
    """What a picture has in common with others of its kind: the name of its file."""
    return str(picture.clip if isinstance(picture, Frame | Footage) else getattr(picture, "group", picture))


def blob_of(picture: Any) -> Blob | None:
    """The file that a picture is in."""
    found = picture.clip if isinstance(picture, Frame | Footage) else picture
    return found if isinstance(found, Blob) else None


def check_files(spec: SourceSpec, files: Mapping[Blob, str], where: Where | None = None) -> None:
    """Refuse files that are not there, given with the sample that names them.

    Raises:
        DataError: naming the first.
    """
    there: dict[Path, bool] = {}
    missing = [
        (blob, name) for blob, name in files.items() if not there.setdefault(blob.path, blob.path.is_file())
    ]
    if missing:
        blob, name = missing[0]
        few = (
            "1 image is not there:" if len(missing) == 1 else f"{len(missing):,} images are not there, first"
        )
        of = where(name, [blob]) if where else name
        raise DataError(
            f"{spec.name}: {few} {blob.path} of {of}", 'mend the paths, or set unreadable = "mask"'
        )


def path_of(spec: SourceSpec, what: str) -> Path:
    """`spec.path`.

    Raises:
        DataError: there is none; `what` says what it should be.
    """
    if spec.path is None:
        raise DataError(f"data.path: the source {spec.name!r} needs the path of {what}")
    return Path(spec.path).expanduser()
