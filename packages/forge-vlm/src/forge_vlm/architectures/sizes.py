"""What a run on an imported model needs beside the model: room for its pictures, and the id that stands for
one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forge_core.config import Config
from forge_core.config.tables import ModelConfig
from forge_core.contract import UnsuitedError
from forge_core.contract.architecture import InputToken
from forge_core.model.architectures import free_ids, special_id
from forge_vlm.options_packed import PatchesOptions
from forge_vlm.table import VlmConfig

KEY = "vlm.image_token_id"
MOST = 1024
"""Tokens of the largest image of an imported model, where images have sizes of their own."""
ROOM = 512
"""Tokens of text that a sequence has room for beside its picture, as far as the model's length allows."""


def with_room(model: Mapping[str, Any], vlm: Mapping[str, Any], tokens: int) -> dict[str, dict[str, Any]]:
    """Tables of an imported model whose pictures take `tokens` each, with a length of sequences that they
    fit."""
    length = min(tokens * vlm.get("max_images", 1) + ROOM, model["max_seq_len"])
    return {"model": dict(model), "train": {"seq_len": length}, "vlm": dict(vlm)}


def image_token_id(config: Config, *, text: str, within: bool) -> int:
    """The id that stands for an image in files of theirs: that of `vlm.image_token_id`, or else that of the
    tokenizer's special token, or one that no text has.

    Args:
        text: of their token.
        within: the id has to be one of the vocabulary; otherwise the first one behind it serves, too.

    Raises:
        UnsuitedError: there is none.
    """
    found, size = config[VlmConfig].image_token_id, config[ModelConfig].vocab_size or 0
    if found is None and not within:
        return size
    if found is None:
        found = special_id(config, text)
    free = free_ids(config)
    if found is None and free:
        return free[0]
    if found is None or (within and found >= size):
        said = "is not set" if found is None else f"= {found} is not in the vocabulary of {size}"
        raise UnsuitedError(
            f"{KEY} {said}: the id of the token {text} that stands for an image",
            f"give an id below {size} that no text has, with --{KEY}={free[0] if free else 'N'}",
        )
    return found


def image_tokens(text: str, key: str) -> Callable[[Mapping[str, Any]], Sequence[InputToken]]:
    """`Architecture.tokens` of a family.

    Args:
        text: of the token that stands for an image. key: of its id in config.json.
    """
    return lambda keys: (InputToken(text, keys[key], KEY),)


def modest(tables: Mapping[str, Mapping[str, Any]]) -> tuple[Mapping[str, Mapping[str, Any]], Sequence[str]]:
    """`Architecture.for_training` of families whose images have sizes of their own: the largest one takes at
    most `MOST` tokens, and sequences are as long as that needs."""
    vlm = tables["vlm"]
    encoder = dict(vlm["encoder"]["patches"])
    square = (encoder["patch_size"] * vlm["connector"]["patch_merger"]["side"]) ** 2
    options = PatchesOptions(**encoder)
    pixels = max(MOST * square, options.min_pixels)
    if options.max_pixels <= pixels:
        return tables, ()
    encoder["max_pixels"] = pixels
    found = with_room(
        tables["model"], {**vlm, "encoder": {**vlm["encoder"], "patches": encoder}}, pixels // square
    )
    length = found["train"]["seq_len"]
    line = (
        f"vlm.encoder.patches.max_pixels is {pixels}, not the {options.max_pixels} of the folder, so that "
        f"train.seq_len = {length} holds an image ({pixels // square} tokens) and text: raise both for finer "
        "pictures, lower both for speed"
    )
    return {**tables, **found}, (line,)
