"""What does not go together where a model sees, in words. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.config import Config, Problem
from forge_core.config.tables import TrainConfig
from forge_core.errors import ForgeError
from forge_vlm.geometry import shape_of
from forge_vlm.table import VlmConfig


def all_problems(config: Config) -> Iterator[Problem]:
    """Every problem of `[vlm]` beside those of single keys."""
    yield from _length_problems(config)
    yield from _heads_problems(config)
    if "pp" in config:
        message = "an encoder in front of a decoder that is cut into stages is not offered yet"
        yield Problem("vlm", message, "train without [pp], or without [vlm]")


def _length_problems(config: Config) -> Iterator[Problem]:
    try:
        shape = shape_of(config)
    except ForgeError as error:
        yield Problem("vlm.connector", error.message, error.hint)
        return
    length, most = config[TrainConfig].seq_len, config[VlmConfig].max_images
    if shape.places * most >= length:
        message = f"{most} images of {shape.places} tokens leave no room for text in {length} tokens"
        yield Problem("train.seq_len", message, "raise it, lower vlm.max_images, or pool in the connector")


def _heads_problems(config: Config) -> Iterator[Problem]:
    connector = config[VlmConfig].connector.name
    options = config.options("vlm.connector", connector)
    heads = getattr(options, "n_heads", 1)
    try:
        width = shape_of(config).geometry.dim
    except ForgeError:
        return
    if width % heads:
        message = f"{heads} does not divide the encoder's width {width}"
        yield Problem(f"vlm.connector.{connector}.n_heads", message)
