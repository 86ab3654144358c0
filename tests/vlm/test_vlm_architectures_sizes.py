"""Configurations of Qwen2-VL, Qwen2.5-VL and Llama 3.2 Vision as their files have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vlmkit import config_of, merged
from vlmsizes import PACKED, TILED

from forge_core.contract import UnsuitedError
from forge_core.errors import ForgeError
from forge_core.plugins import Plugins
from forge_vlm.architectures import ARCHITECTURES
from forge_vlm.geometry import PackedGeometry
from forge_vlm.options_packed import PatchesOptions
from forge_vlm.options_tiled import TilesOptions

QWEN2: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 1536,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
    "preprocessor_config.json": {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
    },
}
"""As the first releases wrote it: what is about text beside what is about the whole."""

QWEN2_5: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "layer_types": ["full_attention"] * 36,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}

MLLAMA: dict[str, Any] = {
    "model_type": "mllama",
    "image_token_index": 128256,
    "text_config": {
        "hidden_size": 4096,
        "num_hidden_layers": 40,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "image_size": 560,
        "intermediate_layers_indices": [3, 7, 15, 23, 30],
        "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
    },
    "preprocessor_config.json": {
        "do_pad": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "max_image_tiles": 4,
        "resample": 2,
        "size": {"height": 560, "width": 560},
    },
}


def read(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = ARCHITECTURES[config["model_type"]].read(merged(config, more))
    return found


def test_flat_files_of_qwen2_vl() -> None:
    tables = read(QWEN2)
    model, vlm = tables["model"], tables["vlm"]
    assert (model["dim"], model["n_kv_heads"], model["rope_theta"]) == (1536, 2, 1e6)
    assert model["rope_sections"] == [16, 24, 24]
    assert model["rope_scaling"] == {"type": "none"}
    assert model["tie_embeddings"] is True
    assert "sliding_window" not in model
    encoder = PatchesOptions(**vlm["encoder"]["patches"])
    assert (encoder.hidden_dim, encoder.activation, encoder.window) == (5120, "quick_gelu", 0)
    geometry, tokens = encoder.geometry().behind(type("", (), {"side": 2}))
    assert isinstance(geometry, PackedGeometry)
    assert tokens == 16384
    assert tables["train"]["seq_len"] == 16384 + 512
    assert vlm["connector"]["patch_merger"] == {"side": 2, "norm": "layernorm"}


def test_an_import_gives_pictures_a_moderate_size() -> None:
    """1024 tokens of 28 x 28 pixels; what is smaller already stays, and so does what must not be smaller."""
    architecture = ARCHITECTURES["qwen2_vl"]
    tables, [line, videos] = architecture.for_training(read(QWEN2))
    encoder = tables["vlm"]["encoder"]["patches"]
    assert (encoder["max_pixels"], tables["train"]["seq_len"]) == (1024 * 28 * 28, 1024 + 512)
    assert "max_pixels" in line
    assert "train.seq_len = 1536" in line
    assert "at most 16 frames" in videos
    geometry, _ = PatchesOptions(**encoder).geometry().behind(type("", (), {"side": 2}))
    assert geometry.clip_patches(16) <= geometry.patches
    assert architecture.for_training(tables) == (tables, ())
    assert tables["vlm"]["image_token_id"] == read(QWEN2)["vlm"]["image_token_id"]
    large = {**encoder, "min_pixels": 2000 * 784, "max_pixels": 3000 * 784}
    vlm = {**tables["vlm"], "encoder": {"name": "patches", "patches": large}}
    kept, _ = architecture.for_training({**tables, "vlm": vlm})
    assert kept["vlm"]["encoder"]["patches"]["max_pixels"] == 2000 * 784
    assert kept["train"]["seq_len"] == 2000 + 512


def test_nested_files_of_qwen2_5_vl() -> None:
    tables = read(QWEN2_5)
    encoder = PatchesOptions(**tables["vlm"]["encoder"]["patches"])
    assert (encoder.dim, encoder.hidden_dim, encoder.gated_mlp, encoder.norm) == (1280, 3420, True, "rmsnorm")
    assert (encoder.window, encoder.full_layers) == (8, [7, 15, 23, 31])
    assert tables["model"]["rope_sections"] == [16, 24, 24]
    assert tables["model"]["tie_embeddings"] is True


def test_files_of_llama_vision() -> None:
    tables = read(MLLAMA)
    model, vlm = tables["model"], tables["vlm"]
    assert (model["vocab_size"], model["rope_scaling"]["type"], model["rope_theta"]) == (
        128256,
        "llama3",
        5e5,
    )
    encoder = TilesOptions(**vlm["encoder"]["tiles"])
    assert (encoder.image_size, encoder.out_dim, encoder.mean[0]) == (560, 7680, 0.48145466)
    assert encoder.geometry().patches == 4 * 1601
    assert vlm["gated_cross_attention"]["layers"] == [3, 8, 13, 18, 23, 28, 33, 38]
    assert vlm["image_token_id"] == 128256


def test_what_files_say_of_videos() -> None:
    """Inside the processor's file, in one of its own, or in that of images; else what their code has."""
    video = {"size": {"shortest_edge": 3136, "longest_edge": 50176}, "fps": 4.0, "max_frames": 12}
    both = {"image_processor": QWEN2["preprocessor_config.json"], "video_processor": video}
    found = {
        "own": read(QWEN2, **{"video_preprocessor_config.json": video}),
        "inside": read(QWEN2, **{"processor_config.json": both}),
        "images": read(QWEN2),
        "none": read(QWEN2_5, vision_config={"tokens_per_second": 2}),
    }
    limits = {
        name: (patches["video_min_pixels"], patches["video_max_pixels"])
        for name, tables in found.items()
        for patches in [tables["vlm"]["encoder"]["patches"]]
    }
    assert limits == {
        "own": (3136, 50176),
        "inside": (3136, 50176),
        "images": (3136, 12845056),
        "none": (100352, 602112),
    }
    stretches = {"fps": 4.0, "max_frames": 12, "multiple": 2}
    assert found["own"]["vlm"]["video"] == {"frames": "stretches", "stretches": stretches}
    assert found["none"]["vlm"]["video_token_id"] == 151656
    assert found["none"]["vlm"]["encoder"]["patches"]["tokens_per_second"] == 2.0
    capped = {"video_preprocessor_config.json": {"cap_pixels_per_frame": True}}
    assert read(QWEN2, **capped)["vlm"]["encoder"]["patches"]["video_tokens"] == 128000


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        (QWEN2, {"vision_config": {"hidden_size": 8}}, "tokens of width 8, and the decoder takes 1536"),
        (QWEN2, {"vision_config": {"patch_size": [14, 7]}}, "are not square"),
        (QWEN2, {"vision_config": {"hidden_act": "relu"}}, "'relu' of the encoder is not offered"),
        (QWEN2, {"preprocessor_config.json": {"merge_size": 4}}, "merge_size = 4, and the encoder has 2"),
        (
            QWEN2,
            {"video_preprocessor_config.json": {"temporal_patch_size": 4}},
            "videos are prepared with temporal_patch_size = 4, and the encoder has 2",
        ),
        (
            QWEN2,
            {"video_preprocessor_config.json": {"image_mean": [0.5, 0.5, 0.5]}},
            "pictures and videos are prepared with another mean",
        ),
        (MLLAMA, {"vision_config": {"vision_output_dim": 1}}, "not vision_output_dim = 1"),
        (MLLAMA, {"vision_config": {"supported_aspect_ratios": [[1, 1]]}}, "arrangements of tiles"),
        (MLLAMA, {"preprocessor_config.json": {"max_image_tiles": 2}}, "have 2 tiles, and the tower takes 4"),
        (MLLAMA, {"preprocessor_config.json": {"size": {"height": 448}}}, "and the tower takes 560"),
    ],
)
def test_what_is_not_offered_is_refused(config: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        read(config, **more)


WHOLE = {"window": 0, "full_layers": [], "hidden_dim": 32}
QWEN = merged(PACKED, {"model": {"attention_bias": True}, "vlm": {"encoder": {"patches": WHOLE}}})
BIASES = {"attention_bias": True, "output_bias": True}


@pytest.mark.parametrize(
    ("name", "tables", "model", "message"),
    [
        ("mllama", TILED, BIASES, r"model\.attention_bias = True"),
        ("mllama", TILED, {"mlp_bias": True}, r"model\.mlp_bias = True"),
        ("mllama", TILED, {"head_dim": 16}, r"model\.head_dim = 16"),
        ("qwen2_vl", QWEN, {"head_dim": 16, "rope_sections": [4, 2, 2]}, r"model\.head_dim = 16"),
    ],
)
def test_what_a_text_model_of_theirs_does_not_ask_is_not_written(
    tmp_path: Path, name: str, tables: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    """Words of the plain family that the one inside has as well, and does not read."""
    write = ARCHITECTURES[name].write
    assert write(config_of(tmp_path, Plugins(), **tables))["text_config"]
    with pytest.raises(UnsuitedError, match=message):
        write(config_of(tmp_path, Plugins(), **merged(tables, {"model": model})))
