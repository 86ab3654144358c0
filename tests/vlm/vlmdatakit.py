"""Sources of images and text for tests, opened as a run opens them, and real pictures to put into them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import vlmkit
from numpy.typing import NDArray
from PIL import Image

from forge_core.config import Config
from forge_core.config.fields import evolve
from forge_core.config.tables import DataConfig, TrainConfig
from forge_core.data.choices import training_choices
from forge_core.data.opening import Opener
from forge_core.data.pipeline import Place, build_stream
from forge_core.data.stream import SampleStream
from forge_core.data.tokenizer import load_tokenizer
from forge_core.plugins import PluginCatalog, Plugins, load_object
from forge_core.testing import tiny_config

FRAMES, RATE = 40, 10


@lru_cache
def digits() -> tuple[list[Any], list[int]]:
    """Pictures of handwritten digits (scikit-learn's), and which digit each is."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.round(found.images * (255 / 16)).astype(np.uint8)
    return [Image.fromarray(each).convert("RGB") for each in pixels[:60]], found.target[:60].tolist()


def encoded(picture: Any, kind: str = "PNG") -> bytes:
    content = io.BytesIO()
    picture.save(content, kind)
    return content.getvalue()


def configured(data: dict[str, Any], *flags: str, **tables: Any) -> tuple[Config, Any]:
    """A configuration, and what finds the targets of its components."""
    plugins = Plugins()
    found = vlmkit.tables("", **tables)
    found["data"] = {"tokenizer": "bytes", "holdout": 0.0, **data}
    config = tiny_config(*flags, plugins=plugins, **found)
    catalog = PluginCatalog(plugins)

    def component(kind: str, name: str) -> Any:
        return load_object(catalog.component(kind, name).target)

    return config, component


def opener(config: Config, component: Any, **train: Any) -> Opener:
    """What opens the sources of a configuration."""
    found = Opener(
        data=config[DataConfig],
        train=evolve(config[TrainConfig], **train),
        tokenizer=load_tokenizer("bytes"),
        vocab_size=300,
        holdout=config[DataConfig].holdout,
        config=config,
    )
    found.component = component
    return found


def open_source(path: Path | str, source: str, *, split: Any = "train", **tables: Any) -> Any:
    """The source `source` of a path."""
    data = {"source": source, "path": str(path), **tables.pop("data", {})}
    config, component = configured(data, **tables)
    return opener(config, component).open(training_choices(config, component)[0], split)


def rows_of(source: Any) -> list[dict[str, NDArray[Any]]]:
    """All of its rows."""
    if hasattr(source, "__len__"):
        return [source[number] for number in range(len(source))]
    return list(source.once())


def answers_of(rows: Iterable[Mapping[str, NDArray[Any]]]) -> list[str]:
    """What is supervised of each row, ends as |."""
    found = []
    for row in rows:
        targets = row["targets"][row["targets"] >= 0].tolist()
        found.append("".join("|" if token == 256 else chr(token) for token in targets))
    return found


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_clip(path: Path, frames: int = FRAMES, kind: str | None = None) -> Path:
    """Frame n is gray of brightness 6 n, with a key frame every 12."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format=kind) as clip:
        stream: Any = clip.add_stream("mpeg4", rate=RATE)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        stream.gop_size = 12
        stream.time_base = Fraction(1, RATE)
        for number in range(frames):
            picture = np.full((32, 32, 3), 6 * number, dtype=np.uint8)
            clip.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        clip.mux(stream.encode())
    return path


def brightness(row: Mapping[str, NDArray[Any]]) -> list[float]:
    """Mean of each image that is present."""
    return [float(pixels.mean()) for pixels in row["pixels"][row["present"]]]


def stream_of(
    config: Config, component: Any, *, rank: int = 0, ranks: int = 1, batch_size: int, window: int
) -> SampleStream:
    """What one rank of several reads, `window` samples an update over all of them."""
    found = opener(config, component, batch_size=batch_size)
    return build_stream(
        found, training_choices(config, component), window, Place(data_rank=rank, data_size=ranks)
    )
