"""Configurations of families that see: what files leave out, what is refused, and what cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vlmkit import merged

from forge_core.contract import UnsuitedError
from forge_core.errors import ForgeError
from forge_core.plugins import Plugins
from forge_core.testing import tiny_config
from forge_vlm.architectures import ARCHITECTURES
from forge_vlm.geometry import shape_of

LLAVA: dict[str, Any] = {
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "text_config": {
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "vocab_size": 32064,
    },
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
PALIGEMMA: dict[str, Any] = {
    "hidden_size": 2048,
    "image_token_index": 257152,
    "projection_dim": 2048,
    "text_config": {
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "model_type": "gemma",
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "vocab_size": 257216,
    },
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
PALIGEMMA_2 = merged(
    PALIGEMMA,
    {
        "projection_dim": 2304,
        "text_config": {
            "model_type": "gemma2",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
    },
)
SMOLVLM: dict[str, Any] = {
    "image_token_id": 49190,
    "scale_factor": 4,
    "tie_word_embeddings": False,
    "text_config": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rope_theta": 100000,
        "vocab_size": 49280,
    },
    "vision_config": {
        "hidden_size": 768,
        "image_size": 512,
        "model_type": "smolvlm_vision",
        "num_attention_heads": 12,
        "patch_size": 16,
    },
}
FILES = {
    "llava": LLAVA,
    "paligemma": PALIGEMMA,
    "paligemma, second": PALIGEMMA_2,
    "smolvlm": SMOLVLM,
    "idefics3": SMOLVLM,
    "llava, of defaults": {**LLAVA, "text_config": {"model_type": "mistral"}, "vision_config": {}},
    "llava, of qwen": {**LLAVA, "text_config": {"model_type": "qwen2", "hidden_size": 64}},
}
"""What a config.json says that leaves out what equals the defaults of its classes."""


def read(name: str, keys: dict[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = ARCHITECTURES[name.partition(",")[0]].read(keys)
    return tables


@pytest.mark.parametrize("name", FILES)
def test_what_a_file_leaves_out_is_what_transformers_takes_for_it(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind = name.partition(",")[0]
    whole = transformers.AutoConfig.for_model(kind, **FILES[name]).to_dict()
    short, full = read(name, FILES[name]), read(name, whole)
    assert short["model"] == full["model"]
    encoder = {part["name"]: options_of(part) for part in (short["vlm"]["encoder"], full["vlm"]["encoder"])}
    assert len(encoder) == 1
    assert options_of(short["vlm"]["encoder"]) == options_of(full["vlm"]["encoder"])
    assert short["vlm"]["connector"] == full["vlm"]["connector"]
    assert short["train"] == full["train"]


def options_of(encoder: dict[str, Any]) -> Any:
    from forge_vlm import options

    kinds = {
        "clip": options.ClipOptions,
        "siglip": options.SiglipOptions,
        "idefics3": options.Idefics3Options,
    }
    return kinds[encoder["name"]](**encoder[encoder["name"]])


def test_sequences_have_room_for_a_picture_and_text() -> None:
    """576 tokens of 24 x 24 patches, and 512 of text."""
    assert read("llava", LLAVA)["train"] == {"seq_len": 1088}
    assert read("smolvlm", SMOLVLM)["train"] == {"seq_len": 64 + 512}
    kept = {"vision_feature_select_strategy": "full", "vision_feature_layer": [-2, -1]}
    assert read("llava", {**LLAVA, **kept})["train"] == {"seq_len": 1089}
    siglip = {**LLAVA, "vision_config": {**LLAVA["vision_config"], "model_type": "siglip_vision_model"}}
    assert read("llava", siglip)["train"] == {"seq_len": 1087}


def test_a_class_token_goes_with_connectors_that_take_tokens_one_by_one() -> None:
    from forge_core.errors import ConfigError

    clip = {**TOWER, "class_token": True, "layers": [-2, -1]}
    config = config_of(encoder={"clip": clip})
    shape = shape_of(config)
    assert (shape.tokens, shape.geometry.patches, shape.geometry.dim) == (17, 17, 2 * TOWER["dim"])
    with pytest.raises(ConfigError, match="a token stands before that of this encoder"):
        config_of(encoder={"clip": clip}, connector={"name": "pixel_shuffle"})
    siglip = {"name": "siglip", "siglip": {**TOWER, "layer": -1, "drop_first": True}}
    assert shape_of(config_of(encoder=siglip)).tokens == 15
    with pytest.raises(ConfigError, match="a token is missing in that of this encoder"):
        config_of(encoder=siglip, connector={"name": "average_pool"})
    with pytest.raises(ConfigError, match=r"clip\.layers: there is none of this number among 1 block: 7"):
        config_of(encoder={"clip": {**clip, "layers": [-1, 7]}})


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "tower": ("llava", {"vision_config": {"model_type": "pixtral"}}, "tower of type 'pixtral'"),
    "text": ("llava", {"text_config": {"model_type": "mamba"}}, "text model of type 'mamba'"),
    "activation": ("llava", {"projector_hidden_act": "xielu"}, "'xielu' of the projector"),
    "tower's activation": (
        "llava",
        {"vision_config": {"hidden_act": "xielu"}},
        "'xielu' of the vision tower",
    ),
    "not square": ("llava", {"vision_config": {"image_size": [336, 224]}}, "not square"),
    "another size": (
        "llava",
        {"preprocessor_config.json": {"size": {"shortest_edge": 224}}},
        r"brought to \[224\] pixels, and the tower takes 336",
    ),
    "keep their shape": (
        "llava",
        {"preprocessor_config.json": {"size": {"shortest_edge": 336}, "do_center_crop": False}},
        "keep their shape",
    ),
    "rescaled": ("llava", {"preprocessor_config.json": {"rescale_factor": 1.0}}, "rescaled by 1.0"),
    "widths": ("paligemma", {"projection_dim": 1024}, "projection_dim = 1024"),
    "factor": ("smolvlm", {"scale_factor": 3}, "scale_factor = 3 does not divide 32 patches"),
    "pieces": (
        "smolvlm",
        {"preprocessor_config.json": {"max_image_size": {"longest_edge": 364}}},
        "pieces of pictures are of 364 pixels, and the tower takes 512",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_counterpart_is_refused(what: str) -> None:
    name, changes, message = REFUSED[what]
    with pytest.raises(ForgeError, match=message):
        read(name, merged(FILES[name], changes))


TOWER = {"image_size": 12, "patch_size": 3, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}
SEEING: dict[str, Any] = {
    "image_token_id": 5,
    "encoder": {"name": "clip", "clip": TOWER},
    "connector": {"name": "mlp"},
}
UNSUITED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no id": ("llava", {"image_token_id": None}, "vlm.image_token_id is not set"),
    "id outside": ("llava", {"image_token_id": 64}, "= 64 is not in the vocabulary"),
    "encoder": (
        "llava",
        {"encoder": {"name": "vit", "vit": {"image_size": 16}}},
        "no family has the encoder of vlm.encoder.name = vit: clip is of LLaVA",
    ),
    "connector": ("llava", {"connector": {"name": "linear"}}, "not vlm.connector.name = linear"),
    "hidden width": (
        "llava",
        {"connector": {"mlp": {"hidden_dim": 24}}},
        "vlm.connector.mlp.hidden_dim = 24",
    ),
    "fusion": ("llava", {"fusion": "cross_attention", "cross_attention": {"every": 1}}, "vlm.fusion = cross"),
    "mask": ("llava", {"joint": {"bidirectional": "image"}}, "vlm.joint.bidirectional = image"),
    "last norm": (
        "llava",
        {"encoder": {"name": "siglip", "siglip": TOWER}},
        "vlm.encoder names no layer",
    ),
    "decoder": (
        "paligemma",
        {"encoder": {"name": "siglip", "siglip": TOWER}, "connector": {"name": "linear"}},
        "gemma has no word for",
    ),
    "shuffle with a bias": (
        "idefics3",
        {
            "encoder": {"name": "idefics3", "idefics3": TOWER},
            "connector": {"name": "pixel_shuffle", "pixel_shuffle": {"bias": True}},
            "before_image": "<fake_token_around_image><global-img>",
            "after_image": "<fake_token_around_image>",
        },
        "vlm.connector.pixel_shuffle.bias = True",
    ),
    "other marks": (
        "idefics3",
        {
            "encoder": {"name": "idefics3", "idefics3": TOWER},
            "connector": {"name": "pixel_shuffle"},
            "after_image": "<fake_token_around_image>",
        },
        "other text around pictures than vlm.before_image = ''",
    ),
}


def config_of(**vlm: Any) -> Any:
    tables = {name: value for name, value in merged(SEEING, vlm).items() if value is not None}
    return tiny_config(plugins=Plugins(), train={"seq_len": 64}, model={"vocab_size": 64}, vlm=tables)


def test_what_fits_is_written() -> None:
    keys = ARCHITECTURES["llava"].write(config_of())
    assert keys["vision_config"]["model_type"] == "clip_vision_model"
    assert keys["image_token_index"] == 5
    assert keys["preprocessor_config.json"]["crop_size"] == {"height": 12, "width": 12}


@pytest.mark.parametrize("what", UNSUITED)
def test_what_a_family_has_no_word_for_is_not_written(what: str) -> None:
    name, changes, message = UNSUITED[what]
    with pytest.raises(UnsuitedError, match=message):
        ARCHITECTURES[name].write(config_of(**changes))


def test_a_text_model_is_of_no_family_that_sees() -> None:
    for name, architecture in ARCHITECTURES.items():
        with pytest.raises(UnsuitedError, match="sees"):
            architecture.write(tiny_config(plugins=Plugins()))
        assert architecture.class_name.endswith("ForConditionalGeneration"), name


@pytest.mark.packages("ckpt", "vlm")
@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("llava", "language_model.lm_head.weight", "decoder.head.weight"),
        ("llava", "lm_head.weight", "decoder.head.weight"),
        (
            "llava",
            "model.language_model.layers.1.mlp.up_proj.weight",
            "decoder.layers.1.mlp.up_proj.weight",
        ),
        (
            "llava",
            "vision_tower.vision_model.embeddings.class_embedding",
            "encoder.tower.embeddings.class_embedding",
        ),
        (
            "llava",
            "model.vision_tower.vision_model.pre_layrnorm.bias",
            "encoder.tower.pre_layrnorm.bias",
        ),
        ("llava", "model.vision_tower.post_layernorm.bias", "encoder.tower.post_layernorm.bias"),
        ("llava", "model.multi_modal_projector.linear_2.bias", "connector.down_proj.bias"),
    ],
)
def test_names_of_all_layouts(name: str, theirs: str, ours: str) -> None:
    from forge_ckpt.hf import units

    rules = ARCHITECTURES[name].rules(config_of())
    assert units.unit_of(rules, theirs, theirs=True).ours == (ours,)


def test_options_of_a_tower_come_from_its_folder(tmp_path: Path) -> None:
    """Sizes, activation and statistics; what is written is what the folder says, not what the keys do."""
    import json

    vision: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 12, "patch_size": 3, "hidden_act": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": vision}), encoding="utf-8")
    said = {"image_mean": [0.1, 0.2, 0.3], "resample": 1, "size": {"height": 12, "width": 12}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said), encoding="utf-8")
    config = config_of(encoder={"name": "clip", "clip": {"path": str(tmp_path), "dim": 99}})
    keys = ARCHITECTURES["llava"].write(config)
    assert {name: keys["vision_config"][name] for name in vision} == vision
    prepared = keys["preprocessor_config.json"]
    assert prepared["image_mean"] == [0.1, 0.2, 0.3]
    assert prepared["resample"] == 1
    assert prepared["size"] == {"height": 12, "width": 12}
