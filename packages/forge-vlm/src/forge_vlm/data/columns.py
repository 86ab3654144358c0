"""Which columns of a Hugging Face data set are what, and what is in them. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from forge_core.errors import DataError
from forge_core.files import user_path
from forge_vlm.data.options import HfImagesOptions
from forge_vlm.data.picture import Blob, pixels_of
from forge_vlm.data.pixels import Pixels, pillow, size_of
from forge_vlm.geometry import Geometry

PICTURES_BY = "set images of the source vlm/hf to the columns that hold them"
"""How a data set comes to images."""
First = Callable[[str], Any]
_log = logging.getLogger("forge.data")


def keys_of(options: HfImagesOptions) -> dict[str, Any]:
    """What the core's loader takes of the options."""
    return {key: getattr(options, key) for key in ("split", "format", "name", "revision")}


def folder_of(path: str) -> Path:
    """Where paths of images start: the data set, or the folder of its file."""
    root = user_path(path)
    return root.parent if root.is_file() else root


@attrs.frozen
class Content:
    """An image in memory, or the file that it is in.

    Attributes:
        value: bytes, or a file; anything else is told when it is read. name: what messages call it.
    """

    value: Any
    name: str

    @classmethod
    def of(cls, value: Any, folder: Path, name: str) -> Content:
        """What a data set has of an image: bytes, a path, or a mapping with `bytes` or `path`."""
        content, path = value, value
        if isinstance(value, Mapping):
            content, path = value.get("bytes"), value.get("path")
        if isinstance(content, bytes):
            return cls(content, name)
        if isinstance(path, str):
            return cls(Blob(folder / path, path), name)
        return cls(None if content is None and path is None else value, name)

    def __str__(self) -> str:
        return self.name

    def size_in_pixels(self) -> tuple[int, int]:
        """Height and width.

        Raises:
            DataError: see `pixels`.
        """
        found = self._there()
        return found.size_in_pixels() if isinstance(found, Blob) else size_of(found)

    def pixels(self, geometry: Geometry) -> Pixels:
        """As the encoder takes it.

        Raises:
            DataError: it is no image, or not there.
        """
        found = self._there()
        return found.pixels(geometry) if isinstance(found, Blob) else pixels_of(found, self.name, geometry)

    def _there(self) -> bytes | Blob:
        if isinstance(self.value, bytes | Blob):
            return self.value
        if self.value is None:
            message = f"there is no image {self.name}: the data set has nothing in its place"
            raise DataError(message) from FileNotFoundError(self.name)
        raise DataError(f"{self.name}: an image is bytes or a path, not {type(self.value).__name__}")


def classes_of(features: Any) -> dict[str, list[str]]:
    """Names of classes by column, where it holds their numbers."""
    return {name: list(f.names) for name, f in (features or {}).items() if hasattr(f, "int2str")}


def image_columns(features: Any, first: First) -> list[str]:
    """Columns of images, or of lists of them: those that the library keeps as images, and those of bytes, or
    of mappings with `bytes`, that start with one.

    Args:
        features: kinds of the columns by name. first: column -> the first of its values that is one.
    """
    return [name for name, feature in (features or {}).items() if _of_images(feature, partial(first, name))]


def _of_images(feature: Any, first: Callable[[], Any]) -> bool:
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
    if type(inner).__name__ == "Image":
        return True
    if isinstance(inner, Mapping):
        return _of_bytes(inner.get("bytes")) and _is_image(first(), by_kind={"bytes", "path"} == set(inner))
    return _of_bytes(inner) and _is_image(first(), by_kind=False)


def _of_bytes(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")) in ("binary", "large_binary")


def _is_image(value: Any, by_kind: bool) -> bool:
    """Whether a value of a data set is an image, or a list that starts with one; `by_kind` says it where
    there is no value to look at."""
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    content = value
    if isinstance(value, Mapping):
        content = value.get("bytes")
        if content is None and isinstance(value.get("path"), str):
            return Path(value["path"]).suffix.lower() in pillow().registered_extensions()
    if content is None:
        return by_kind
    try:
        size_of(content)
    except DataError:
        return False
    return True


def _only_images(features: Any, path: str, first: First) -> tuple[str, ...]:
    """The column of images where neither options nor its name say which it is; none if there is none.

    Raises:
        DataError: there are several.
    """
    found = image_columns(features, first)
    if len(found) > 1:
        raise DataError(
            f"{path} has several columns of images: {', '.join(found)}",
            f'say which, in their order: images = ["{found[0]}"] in the table of the source vlm/hf',
        )
    if found:
        _log.info("%s: its images are in the column %r", path, found[0])
    return tuple(found)


def _refuse_videos(features: Any, images: Sequence[str], path: str) -> None:
    """Refuse a data set that would be learnt as text alone, since what it shows are videos.

    Raises:
        DataError: a column of videos is taken for images, or there is one and no image.
    """
    videos = [name for name, feature in (features or {}).items() if type(feature).__name__ == "Video"]
    taken = [name for name in videos if name in images or not images]
    if taken:
        raise DataError(
            f"{path} has videos in the column {taken[0]!r}, and vlm/hf reads images",
            "write the videos as files, with a line of JSON for each sample, for the source vlm/images",
        )


@attrs.frozen(kw_only=True)
class Columns:
    """Which columns are what.

    Attributes:
        images: in their order. texts: key of a record -> column.
    """

    images: tuple[str, ...]
    texts: dict[str, str]

    @classmethod
    def of(
        cls, there: Sequence[str], options: HfImagesOptions, path: str, features: Any, first: First
    ) -> Columns:
        """As the options say.

        Args:
            features, first: see `image_columns`; features None: nobody knows.

        Raises:
            DataError: a column is not there, or there is no text; several columns of images, of which none
                is chosen; videos in place of images.
        """
        images = tuple(options.images) or tuple(name for name in ("image", "images") if name in there)
        images = images or _only_images(features, path, first)
        _refuse_videos(features, images, path)
        kinds = [options.messages] if options.messages else ["messages", "conversations"]
        spoken = [name for name in kinds if name in there or options.messages]
        texts = {"messages": spoken[0]} if spoken else {}
        if not texts:
            texts = {"answer": options.answer}
            if options.prompt in there:
                texts["prompt"] = options.prompt
            texts |= {name: name for name in ("answers", "choices") if name in there}
            if "answers" in texts and options.answer not in there:
                del texts["answer"]
        lacking = [name for name in (*images, *texts.values()) if name not in there]
        if lacking:
            raise DataError(
                f"{path} has no column {lacking[0]!r}; there is: {', '.join(there)}",
                "the keys images, prompt, answer and messages of the source name the columns",
            )
        return cls(images=images, texts=texts)

    def record(self, row: Mapping[str, Any], classes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """The text of a row."""
        found = {}
        for key, column in self.texts.items():
            value = row[column]
            if column in classes and isinstance(value, int):
                value = classes[column][value]
            elif (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and not (key == "answer" and row.get(self.texts.get("choices", "")) is not None)
            ):
                value = str(value)
            elif isinstance(value, list) and key == "answers":
                value = [each.get("answer") if isinstance(each, Mapping) else each for each in value]
            found[key] = value
        return found
