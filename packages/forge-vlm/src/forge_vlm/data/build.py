"""What every source does with the samples it has found. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forge_core.data.source import SourceSpec
from forge_core.data.tokenizer import fingerprint_of
from forge_core.errors import DataError
from forge_vlm.data.options import SampleOptions
from forge_vlm.data.picture import Blob, Frame, measure, read_together
from forge_vlm.data.record import Found
from forge_vlm.data.source import ImageTextSource, image_shape, laid_samples

_SCALE = 1 << 32


def samples_of(
    spec: SourceSpec, options: SampleOptions, found: Iterable[Found], *, origin: str, about: str
) -> ImageTextSource:
    """The samples of one split.

    What is held out is decided by the first image of a sample, or its text, so that questions about one image
    are on one side.

    Args:
        found: all samples. origin: where they are from, in messages.
        about: changes with what the pictures hold, for the fingerprint.

    Raises:
        DataError: a sample that is not right; no sample in the split; images that are not there, where that
            is an error.
    """
    shape = image_shape(spec)
    mine = [sample for sample in found if is_mine(spec, sample)]
    if options.unreadable == "error":
        check_files(spec, mine)
    samples = laid_samples(spec, shape, mine, options.too_long, measure)
    if not samples:
        raise DataError(f"{spec.name}: {origin} leaves no sample for the split {spec.split}")
    return ImageTextSource(
        spec,
        shape,
        samples,
        partial(read_together, geometry=shape.geometry),
        about=repr((options, about, fingerprint_of(spec.tokenizer))),
        pack=options.pack,
        mask_unreadable=options.unreadable == "mask",
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
    return str(picture.clip if isinstance(picture, Frame) else getattr(picture, "group", picture))


def blob_of(picture: Any) -> Blob | None:
    """The file that a picture is in."""
    found = picture.clip if isinstance(picture, Frame) else picture
    return found if isinstance(found, Blob) else None


def blobs_of(found: Iterable[Found]) -> list[Blob]:
    """All files of samples."""
    each = (blob_of(picture) for _, _, pictures, _ in found for picture in pictures)
    return [blob for blob in each if blob is not None]


def check_files(spec: SourceSpec, found: Sequence[Found]) -> None:
    """Refuse samples whose files are not there.

    Raises:
        DataError: naming the first.
    """
    there: dict[Path, bool] = {}
    missing = []
    for name, _, pictures, _ in found:
        for blob in map(blob_of, pictures):
            if blob is not None and not there.setdefault(blob.path, blob.path.is_file()):
                missing.append((name, blob.path))
    if missing:
        name, path = missing[0]
        raise DataError(
            f"{spec.name}: {len(missing)} images are not there, first {path} of {name}",
            'mend the paths, or set unreadable = "mask"',
        )


def path_of(spec: SourceSpec, what: str) -> Path:
    """`spec.path`.

    Raises:
        DataError: there is none; `what` says what it should be.
    """
    if spec.path is None:
        raise DataError(f"data.path: the source {spec.name!r} needs the path of {what}")
    return Path(spec.path).expanduser()
