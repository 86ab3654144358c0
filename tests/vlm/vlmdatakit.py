"""Sources of images and text for tests, opened as a run opens them, and real pictures to put into them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from contextlib import closing
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from vlmkit import config_of

from forge_core.data.choices import training_choices
from forge_core.data.inspect_step import open_stream
from forge_core.data.opening import Opener
from forge_core.data.stream import SampleStream
from forge_core.data.tokenizer import load_tokenizer
from forge_core.plugins import PluginCatalog, Plugins, load_object

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


def opener(path: Path | str | None, source: str, *flags: str, **tables: Any) -> tuple[Opener, Any, Any]:
    """What opens sources, the choices of a configuration, and the configuration."""
    plugins = Plugins()
    data = {"source": source, **({} if path is None else {"path": str(path)}), **tables.pop("data", {})}
    config = config_of("", plugins, *flags, data=data, **tables)
    catalog = PluginCatalog(plugins)

    def component(kind: str, name: str) -> Any:
        return load_object(catalog.component(kind, name).target)

    found = Opener(
        data=config.get("data"),
        train=config.get("train"),
        tokenizer=load_tokenizer("bytes"),
        vocab_size=300,
        holdout=config.get("data").holdout,
        config=config,
        component=component,
    )
    return found, training_choices(config, component), (config, component)


def open_source(path: Path | str, source: str, *, split: Any = "train", **tables: Any) -> Any:
    """The first source of a configuration."""
    opened, choices, _ = opener(path, source, **tables)
    return opened.open(choices[0], split)


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


def batches(window: int, steps: int, *flags: str, **tables: Any) -> list[Any]:
    """What `steps` updates of a configuration read, in this process or in `data.num_workers` others."""
    _, choices, (config, component) = opener(None, "vlm/images", *flags, **tables)
    del choices
    stream = open_stream(config, component, load_tokenizer("bytes"), window)
    with closing(stream):
        return [stream.take(1)[0] for _ in range(steps)]


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
    config: Any, component: Any, rank: int, ranks: int, batch_size: int, window: int
) -> SampleStream:
    """What one rank of several reads."""
    from forge_core.config.fields import evolve
    from forge_core.data.pipeline import Place, build_stream

    train = evolve(config.get("train"), batch_size=batch_size)
    found = Opener(
        data=config.get("data"),
        train=train,
        tokenizer=load_tokenizer("bytes"),
        vocab_size=300,
        config=config,
        component=component,
    )
    return build_stream(found, training_choices(config, component), window, Place(rank, ranks))
