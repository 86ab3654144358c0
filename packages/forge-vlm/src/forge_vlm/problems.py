"""What does not go together where a model sees, in words. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from forge_core.config import Config, Problem
from forge_core.config.tables import DataConfig, EvalConfig, ModelConfig, TrainConfig
from forge_core.data.missing import missing_paths, named_paths
from forge_core.data.wording import counted
from forge_core.errors import ForgeError
from forge_core.files import is_there, user_path
from forge_vlm.data.options import StretchesOptions, UniformOptions
from forge_vlm.geometry import PackedGeometry, shape_of
from forge_vlm.options import AttentionalPoolOptions, CrossAttentionOptions, MomaOptions, MotOptions
from forge_vlm.options_tiled import GatedCrossOptions
from forge_vlm.table import VlmConfig

ASKING = frozenset(("exact_match", "vqa_accuracy", "relaxed_accuracy"))
"""Metrics of our own that let the model answer: `VlmMetric.asks`, without its torch."""
OF_VIDEOS = "vlm/webvid"
OF_FILES = ("vlm/images", "vlm/webdataset", OF_VIDEOS)
"""Sources whose path is a file, a folder or a pattern here."""
TAKEN = {"vlm/images": "data.jsonl", "vlm/webdataset": "*.tar", OF_VIDEOS: "*.csv"}
"""What each of them takes from a folder."""
PATTERN = re.compile(r"[*?\[{]")


def all_problems(config: Config) -> Iterator[Problem]:
    """Every problem of `[vlm]` beside those of single keys."""
    yield from _length_problems(config)
    yield from _heads_problems(config)
    yield from _fusion_problems(config)
    yield from _answer_problems(config[VlmConfig])
    yield from _video_problems(config)
    yield from missing_paths(config, OF_FILES, _is_there)
    yield from _bare_folders(config)


def _is_there(path: str) -> bool:
    """Whether there is a file or a folder; of a pattern, the folder in which it begins."""
    plain = PATTERN.split(path, maxsplit=1)[0]
    return is_there(path) or (plain != path and is_there(str(Path(plain + "x").parent)))


def _bare_folders(config: Config) -> Iterator[Problem]:
    """Folders that lack what a source takes from them."""
    for key, source, path in named_paths(config, OF_FILES):
        taken, folder = TAKEN[source], user_path(path)
        try:
            if not folder.is_dir() or next(folder.glob(taken), None) is not None:
                continue
            others = sorted(each.name for each in folder.glob(f"*{Path(taken).suffix}"))
        except OSError:  # not to be looked at
            continue
        hint = (
            f'name the file: {key} = "{folder / others[0]}"'
            if others
            else f"{key} is a file, or holds {taken}"
        )
        yield Problem(key, f"there is no {taken} in the folder {path}", hint, at_start=True)


def _answer_problems(vlm: VlmConfig) -> Iterator[Problem]:
    asking = [name for name in vlm.metrics if name in ASKING]
    if asking and not vlm.answer_tokens:
        names = " and ".join([", ".join(asking[:-1]), asking[-1]] if len(asking) > 1 else asking)
        message = f"{names} {'asks' if len(asking) == 1 else 'ask'} the model, and vlm.answer_tokens = 0"
        yield Problem("vlm.metrics", message, "say in vlm.answer_tokens how long answers may be")


def _video_problems(config: Config) -> Iterator[Problem]:
    """More frames than a sequence holds, where there are videos: a source is of videos, or a limit was
    chosen."""
    vlm, data = config[VlmConfig], config[DataConfig]
    options = config.options("vlm.video", vlm.video.frames)
    if not isinstance(options, UniformOptions | StretchesOptions):
        return
    sources = [each.source for each in data.mix] or [data.source]
    sources += [each.source for each in config[EvalConfig].sets]
    if OF_VIDEOS not in sources and options.max_frames == type(options)().max_frames:
        return
    try:
        shape = shape_of(config)
    except ForgeError:
        return
    frames, message = options.max_frames, ""
    if isinstance(shape.geometry, PackedGeometry) and shape.clips:
        patches = shape.geometry.clip_patches(frames)
        if patches > shape.patches:
            message = (
                f"a video of {counted(frames, 'frame')} has up to {patches} patches, more than "
                f"vlm.max_patches = {shape.patches}"
            )
        hint = "lower it, bound all of a video in the encoder's video_tokens, or raise vlm.max_patches"
    elif frames > vlm.max_images:
        message = f"{frames} frames are more than vlm.max_images = {vlm.max_images}"
        hint = "lower it, or raise vlm.max_images"
    if message:
        # runs whose videos were all short have trained with it, and are still read
        yield Problem(f"vlm.video.{vlm.video.frames}.max_frames", message, hint, at_start=True)


def _length_problems(config: Config) -> Iterator[Problem]:
    try:
        shape = shape_of(config)
    except ForgeError as error:
        hint = error.hint or "choose another connector, or sizes of it and the encoder that go together"
        yield Problem("vlm.connector", error.message, hint)
        return
    length, most = config[TrainConfig].seq_len, config[VlmConfig].max_images
    if shape.places and shape.visual >= length:
        each = "up to " if shape.patches else ""
        what = f"{most} image{'s' * (most > 1)} of {each}{shape.tokens} tokens"
        message = f"{what} {'leave' if most > 1 else 'leaves'} no room for text in {length} tokens"
        yield Problem("train.seq_len", message, "raise it, lower vlm.max_images, or pool in the connector")
    if config[VlmConfig].max_patches is not None and not shape.patches:
        message = "images of this encoder are of one size and have no patches to count"
        yield Problem("vlm.max_patches", message, "leave it out")
    if shape.patches and shape.patches < shape.geometry.patches:
        message = f"the largest image has {shape.geometry.patches} patches, more than {shape.patches}"
        yield Problem("vlm.max_patches", message, "raise it, or lower the most pixels of an image")


def _heads_problems(config: Config) -> Iterator[Problem]:
    connector = config[VlmConfig].connector.name
    options = config.options("vlm.connector", connector)
    if not isinstance(options, AttentionalPoolOptions):
        return
    try:
        width = shape_of(config).geometry.dim
    except ForgeError:
        return
    if width % options.n_heads:
        message = f"{options.n_heads} does not divide the encoder's width {width}"
        yield Problem(f"vlm.connector.{connector}.n_heads", message)


def _fusion_problems(config: Config) -> Iterator[Problem]:
    fusion, model = config[VlmConfig].fusion, config[ModelConfig]
    options = config.options("vlm", fusion)
    if isinstance(options, CrossAttentionOptions):
        if options.every > model.n_layers:
            message = (
                f"no block would see images: {options.every} is more than model.n_layers = {model.n_layers}"
            )
            yield Problem("vlm.cross_attention.every", message, "set it lower")
        heads = options.n_heads or model.n_heads
        if heads and model.dim % heads:
            yield Problem("vlm.cross_attention.n_heads", f"{heads} does not divide model.dim = {model.dim}")
    if isinstance(options, GatedCrossOptions):
        yield from _gated_problems(options, model, config[VlmConfig].image_token_id)
    if isinstance(options, MotOptions) and options.positions == "modality" and model.rope_sections:
        message = "model.rope_sections counts on several axes, of which each image has its own part"
        yield Problem("vlm.mot.positions", message, 'leave it at "sequence"')
    if isinstance(options, MomaOptions) and "moe" not in config:
        message = "this fusion takes its experts from [moe], which is not there"
        yield Problem("vlm.fusion", message, 'add the table; pip install "forge-vlm[moma]"')


def _gated_problems(
    options: GatedCrossOptions, model: ModelConfig, image_token_id: int | None
) -> Iterator[Problem]:
    beyond = [number for number in options.layers if number >= model.n_layers]
    if beyond or not options.layers:
        message = f"{options.layers} are no blocks of model.n_layers = {model.n_layers}"
        yield Problem("vlm.gated_cross_attention.layers", message, "name blocks from 0")
    if model.tie_embeddings and options.extra_tokens:
        message = "a head that is the embedding would predict them"
        yield Problem("vlm.gated_cross_attention.extra_tokens", message, "set it to 0, or untie the head")
    rows = (model.vocab_size or 0) + options.extra_tokens
    if options.marked and (image_token_id is None or image_token_id >= rows):
        message = f"a token has to mark an image, and the embedding has {rows} rows"
        hint = "give its id, or set vlm.gated_cross_attention.marked = false"
        yield Problem("vlm.image_token_id", message, hint)
