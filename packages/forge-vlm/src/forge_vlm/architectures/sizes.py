"""What a run on an imported model needs beside the model: room for its pictures, and the id that stands for
one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_core.config import Config
from forge_core.config.tables import ModelConfig
from forge_core.contract import UnsuitedError
from forge_vlm.table import VlmConfig

ROOM = 512
"""Tokens of text that a sequence has room for beside its picture, as far as the model's length allows."""


def with_room(model: Mapping[str, Any], vlm: Mapping[str, Any], tokens: int) -> dict[str, dict[str, Any]]:
    """Tables of an imported model whose pictures take `tokens` each, with a length of sequences that they
    fit."""
    length = min(tokens * vlm.get("max_images", 1) + ROOM, model["max_seq_len"])
    return {"model": dict(model), "train": {"seq_len": length}, "vlm": dict(vlm)}


def image_token_id(config: Config, *, within: bool) -> int:
    """The id that stands for an image in files of theirs.

    Args:
        within: it has to be one of the vocabulary; otherwise the first one behind it serves, too.

    Raises:
        UnsuitedError: nothing says it.
    """
    found, size = config[VlmConfig].image_token_id, config[ModelConfig].vocab_size or 0
    if found is None and not within:
        return size
    if found is None or (within and found >= size):
        said = "is not set" if found is None else f"= {found} is not in the vocabulary"
        raise UnsuitedError(
            f"vlm.image_token_id {said}: the id of the token that stands for an image",
            "give an id that no text has, such as --vlm.image_token_id=5",
        )
    return found
