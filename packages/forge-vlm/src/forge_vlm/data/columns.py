"""Which columns of a Hugging Face data set are what, and what is in them. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from forge_core.errors import DataError
from forge_vlm.data.options import HfImagesOptions
from forge_vlm.data.picture import Blob, pixels_of
from forge_vlm.data.pixels import Pixels, size_of
from forge_vlm.geometry import Geometry

PICTURES_BY = "set images of the source vlm/hf to the columns that hold them"
"""How a data set comes to images."""
_log = logging.getLogger("forge.data")


def keys_of(options: HfImagesOptions) -> dict[str, Any]:
    """What the core's loader takes of the options."""
    return {key: getattr(options, key) for key in ("split", "format", "name", "revision")}


def folder_of(path: str) -> Path:
    """Where paths of images start: the data set, or the folder of its file."""
    root = Path(path).expanduser()
    return root.parent if root.is_file() else root


@attrs.frozen
class Content:
    """An image in memory, or the file that it is in; `name` is what messages call it."""

    value: bytes | Blob
    name: str

    @classmethod
    def of(cls, value: Any, folder: Path, name: str) -> Content:
        """What a data set has of an image: bytes, a path, or a mapping with `bytes` or `path`.

        Raises:
            DataError: neither.
        """
        content, path = value, value
        if isinstance(value, Mapping):
            content, path = value.get("bytes"), value.get("path")
        if isinstance(content, bytes):
            return cls(content, name)
        if isinstance(path, str):
            return cls(Blob(folder / path, path), name)
        raise DataError(f"{name}: an image is bytes or a path, not {type(value).__name__}")

    def __str__(self) -> str:
        return self.name

    def size_in_pixels(self) -> tuple[int, int]:
        """Height and width.

        Raises:
            DataError: see `pixels`.
        """
        value = self.value
        return value.size_in_pixels() if isinstance(value, Blob) else size_of(value)

    def pixels(self, geometry: Geometry) -> Pixels:
        """As the encoder takes it.

        Raises:
            DataError: it is no image, or not there.
        """
        value = self.value
        return value.pixels(geometry) if isinstance(value, Blob) else pixels_of(value, self.name, geometry)


def classes_of(features: Any) -> dict[str, list[str]]:
    """Names of classes by column, where it holds their numbers."""
    return {name: list(f.names) for name, f in (features or {}).items() if hasattr(f, "int2str")}


def image_columns(features: Any) -> list[str]:
    """Columns that the library keeps as images, or as lists of them."""
    return [name for name, feature in (features or {}).items() if _of_images(feature)]


def _of_images(feature: Any) -> bool:
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
    return type(inner).__name__ == "Image"


def _only_images(features: Any, path: str) -> tuple[str, ...]:
    """The column of images where neither options nor its name say which it is; none if there is none.

    Raises:
        DataError: there are several.
    """
    found = image_columns(features)
    if len(found) > 1:
        raise DataError(
            f"{path} has several columns of images: {', '.join(found)}",
            f'say which, in their order: images = ["{found[0]}"] in the table of the source vlm/hf',
        )
    if found:
        _log.info("%s: its images are in the column %r", path, found[0])
    return tuple(found)


@attrs.frozen(kw_only=True)
class Columns:
    """Which columns are what.

    Attributes:
        images: in their order. texts: key of a record -> column.
    """

    images: tuple[str, ...]
    texts: dict[str, str]

    @classmethod
    def of(cls, there: Sequence[str], options: HfImagesOptions, path: str, features: Any = None) -> Columns:
        """As the options say.

        Args:
            features: kinds of the columns by name, where they are known.

        Raises:
            DataError: a column is not there, or there is no text; several columns of images, of which none
                is chosen.
        """
        images = tuple(options.images) or tuple(name for name in ("image", "images") if name in there)
        images = images or _only_images(features, path)
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
