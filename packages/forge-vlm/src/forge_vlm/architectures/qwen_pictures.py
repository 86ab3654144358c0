"""How pictures and videos are prepared for Qwen2-VL and Qwen2.5-VL, in the files of their processors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_core.config import Config
from forge_core.errors import ForgeError
from forge_vlm.architectures.pictures import FILES, common_preparation, processor_files
from forge_vlm.data.options import StretchesOptions, UniformOptions
from forge_vlm.encoders.keys import PREPROCESSOR, PROCESSOR, image_processor, read_picture_keys
from forge_vlm.options_packed import MergerOptions, PatchesOptions
from forge_vlm.table import VlmConfig

HF = Mapping[str, Any]
VIDEO_FILE = "video_preprocessor_config.json"
QWEN_FILES = (*FILES, VIDEO_FILE)
"""Files beside config.json that are read and written."""
_VIDEO = {"min_pixels": 128 * 28 * 28, "max_pixels": 768 * 28 * 28}
_TOKENS = 128_000
_SHARED = ("mean", "std", "resample")


def video_processor(files: HF) -> HF:
    """The video processor's configuration, from where transformers looks for it: inside
    `processor_config.json`, in a file of its own, or, in the first releases, that of images.

    Args:
        files: contents of JSON files by name.
    """
    inside = (files.get(PROCESSOR) or {}).get("video_processor")
    found: HF = inside or files.get(VIDEO_FILE) or files.get(PREPROCESSOR) or {}
    return found


def read_preparation(config: HF, patch: int, side: int, frames: int) -> dict[str, Any]:
    """Options of the encoder about pixels, those that the files say.

    Args:
        patch, side, frames: of the tower, which the files have to agree with.

    Raises:
        ForgeError: they do not, or prepare videos otherwise than pictures.
    """
    images, videos = image_processor(config), video_processor(config)
    for said, what in ((images, "pictures"), (videos, "videos")):
        for name, value in (("patch_size", patch), ("merge_size", side), ("temporal_patch_size", frames)):
            if said.get(name, value) != value:
                message = f"{what} are prepared with {name} = {said[name]}, and the encoder has {value}"
                raise ForgeError(message)
    found, other = (_pixels(said) for said in (images, videos))
    differing = [name for name in _SHARED if name in found and found[name] != other.get(name, found[name])]
    if differing:
        raise ForgeError(f"pictures and videos are prepared with another {' and '.join(differing)}")
    limits = {f"video_{name}": other.get(name, usual) for name, usual in _VIDEO.items()}
    if videos.get("cap_pixels_per_frame"):
        limits["video_tokens"] = int(videos.get("max_video_tokens", _TOKENS))
    return {**found, **limits}


def read_sampling(config: HF, frames: int) -> dict[str, Any]:
    """`[vlm.video]`: frames as their processor picks them where it is asked to."""
    said = video_processor(config)
    keys = {name: said[name] for name in ("fps", "min_frames", "max_frames") if said.get(name) is not None}
    return {"frames": "stretches", "stretches": {**keys, "multiple": frames}}


def _pixels(said: HF) -> dict[str, Any]:
    found = read_picture_keys({key: value for key, value in said.items() if key != "size"}, None)
    size = said.get("size") or {}
    limits = {
        "min_pixels": said.get("min_pixels") or size.get("shortest_edge"),
        "max_pixels": said.get("max_pixels") or size.get("longest_edge"),
    }
    return found | {name: value for name, value in limits.items() if value is not None}


def write_preparation(
    config: Config, encoder: PatchesOptions, merger: MergerOptions, name: str
) -> dict[str, Any]:
    """The files of the processor `name`."""
    both = {
        **common_preparation(encoder),
        "patch_size": encoder.patch_size,
        "merge_size": merger.side,
        "temporal_patch_size": encoder.frames,
    }
    images = {
        **both,
        "image_processor_type": "Qwen2VLImageProcessor",
        **_limits(encoder.min_pixels, encoder.max_pixels),
    }
    videos = {
        **both,
        "video_processor_type": "Qwen2VLVideoProcessor",
        "processor_class": name,
        **_limits(*encoder.video_pixels),
        "cap_pixels_per_frame": encoder.video_tokens is not None,
        **_sampling(config),
    }
    if encoder.video_tokens is not None:
        videos["max_video_tokens"] = encoder.video_tokens
    return {**processor_files(name, images, video_processor=dict(videos)), VIDEO_FILE: videos}


def _limits(least: int, most: int) -> dict[str, Any]:
    size = {"shortest_edge": least, "longest_edge": most}
    return {"min_pixels": least, "max_pixels": most, "size": size}


def _sampling(config: Config) -> dict[str, Any]:
    """How many frames are taken; that frames are taken at all is for the caller to ask there."""
    options = config.options("vlm.video", config[VlmConfig].video.frames)
    if not isinstance(options, StretchesOptions | UniformOptions):
        return {}
    return {"fps": options.fps, "min_frames": options.least, "max_frames": options.max_frames}
