"""What a run on an imported model needs beside the model: room for its pictures, and the id that stands for
one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forge_core.config import Config
from forge_core.config.tables import ModelConfig
from forge_core.contract import UnsuitedError
from forge_core.contract.architecture import InputToken
from forge_core.data.wording import counted
from forge_core.model.architectures import free_ids, special_id
from forge_vlm.data.options import StretchesOptions
from forge_vlm.options_packed import PatchesOptions
from forge_vlm.table import VlmConfig

KEY, VIDEO_KEY = "vlm.image_token_id", "vlm.video_token_id"
MOST = 1024
"""Tokens of the largest image or video of an imported model, where they have sizes of their own."""
FRAMES = 16
"""Most frames of a video of an imported model."""
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


def video_token_id(config: Config, *, text: str, image: int, usual: int) -> int:
    """The id that stands for a video, found as that of an image is; where there is none, the one that it has
    in folders of theirs, if the vocabulary ends before it.

    Args:
        text: of their token. image: id that stands for an image. usual: id in their folders.

    Raises:
        UnsuitedError: there is none.
    """
    size = config[ModelConfig].vocab_size or 0
    found = config[VlmConfig].video_token_id
    if found is None:
        free = [token for token in free_ids(config) if token != image]
        found = next((token for token in (special_id(config, text), *free) if token is not None), None)
    if found is None and usual >= size:
        return usual
    if found is None or found == image:
        raise UnsuitedError(
            f"{VIDEO_KEY} {'is not set' if found is None else f'= {found} stands for an image'}: the id of "
            f"the token {text} that stands for a video",
            f"give an id that no text has, with --{VIDEO_KEY}=N",
        )
    return found


def image_tokens(text: str, key: str) -> Callable[[Mapping[str, Any]], Sequence[InputToken]]:
    """`Architecture.tokens` of a family.

    Args:
        text: of the token that stands for an image. key: of its id in config.json.
    """
    return lambda keys: (InputToken(text, keys[key], KEY),)


def modest(tables: Mapping[str, Mapping[str, Any]]) -> tuple[Mapping[str, Mapping[str, Any]], Sequence[str]]:
    """`Architecture.for_training` of families whose images have sizes of their own: the largest one, or the
    longest video, takes at most `MOST` tokens, and sequences are as long as that needs."""
    vlm = tables["vlm"]
    encoder = dict(vlm["encoder"]["patches"])
    square = (encoder["patch_size"] * vlm["connector"]["patch_merger"]["side"]) ** 2
    options = PatchesOptions(**encoder)
    pixels = max(MOST * square, options.min_pixels)
    room = min(pixels, options.max_pixels) // square
    video, lines = _modest_video(encoder, vlm.get("video", {}), room, square)
    seeing: dict[str, Any] = {**vlm, **video}
    found = {**tables, "vlm": seeing}
    if options.max_pixels <= pixels:
        return found, lines
    patches = {**seeing["encoder"]["patches"], "max_pixels": pixels}
    seeing["encoder"] = {**vlm["encoder"], "patches": patches}
    found |= with_room(tables["model"], seeing, room)
    length = found["train"]["seq_len"]
    line = (
        f"vlm.encoder.patches.max_pixels is {pixels}, not the {options.max_pixels} of the folder, so that "
        f"train.seq_len = {length} holds an image ({room} tokens) and text: raise both for finer "
        "pictures, lower both for speed"
    )
    return found, (line, *lines)


def _modest_video(
    encoder: Mapping[str, Any], video: Mapping[str, Any], room: int, square: int
) -> tuple[dict[str, Any], Sequence[str]]:
    """Keys of `[vlm]` with which a video takes at most `room` tokens of `square` pixels each, and what is
    said of them."""
    options = PatchesOptions(**encoder)
    policy = StretchesOptions(**video.get("stretches", {}))
    frames = min(policy.max_frames, max(FRAMES, policy.min_frames))
    steps = -(-frames // options.frames)
    bound = min(options.video_tokens or room, room)
    # well below the share of a frame: it is never less than 1.05 times the least
    least = max(square, room * square // steps // 2)
    lower = {
        "video_min_pixels": min(options.video_pixels[0], least),
        "video_max_pixels": min(options.video_pixels[1], room * square),
        "video_tokens": bound,
    }
    changed = {**encoder, **lower}
    stretches = {**video.get("stretches", {}), "max_frames": frames}
    if changed == encoder and frames == policy.max_frames:
        return {}, ()
    line = (
        f"a video has at most {counted(frames, 'frame')} (vlm.video.stretches.max_frames), which are shrunk "
        f"until all together take at most {bound * 9 // 10} tokens (vlm.encoder.patches.video_tokens)"
    )
    return {"encoder": {"name": "patches", "patches": changed}, "video": {**video, "stretches": stretches}}, (
        line,
    )
