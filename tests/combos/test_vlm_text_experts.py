"""Families that see around a text model of another plugin, against transformers: logits both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import tomli
from paritykit import ours, randomise
from vlmfamilies import (
    CLIP,
    IMAGE,
    TEXT,
    VISION,
    assert_close,
    our_logits,
    sample_for,
    their_logits,
)

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.packages("ckpt", "moe", "vlm")

QWEN = {"num_experts": 6, "moe_intermediate_size": 20, "num_experts_per_tok": 2}
IDEFICS = {"vision_config": {**VISION, "model_type": "idefics3_vision"}, "scale_factor": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("llava", {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen 2": (
        "llava",
        {**QWEN, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 28, "decoder_sparse_step": 2},
    ),
    "qwen 3": ("llava", {**QWEN, "model_type": "qwen3_moe", "head_dim": 16, "norm_topk_prob": True}),
    "deepseek": (
        "llava",
        {
            "model_type": "deepseek_v3",
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "kv_lora_rank": 12,
            "q_lora_rank": 10,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 8,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
    ),
    "idefics 3 with qwen 3": (
        "idefics3",
        {**QWEN, "model_type": "qwen3_moe", "head_dim": 8, "mlp_only_layers": [1]},
    ),
}
"""`model_type` and what its text model says beside the sizes."""
ALWAYS = ("mixtral", "qwen 3")
each_family = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in FAMILIES]
)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


def theirs(family: str) -> Any:
    """A model of transformers whose every parameter is random."""
    name, text = FAMILIES[family]
    stands = "image_token_index" if name == "llava" else "image_token_id"
    around = {"vision_config": CLIP} if name == "llava" else IDEFICS
    keys = {**around, "text_config": {**TEXT, **text}, stands: IMAGE}
    config = transformers.AutoConfig.for_model(name, **keys)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    randomise(model, 7)
    return model


@each_family
def test_import_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    from forge_ckpt.hf.importing import import_hf
    from forge_ckpt.hf.opening import open_model

    model = theirs(family)
    model.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    given = sample_for(model.config)
    import_hf(tmp_path / "hf", tmp_path / "ours")
    assert tomli.loads((tmp_path / "ours/model.toml").read_text())["moe"]["top_k"] == 2
    for place in ("hf", "ours"):
        mine = ours(open_model(tmp_path / place))
        assert_close(our_logits(mine, given), their_logits(model, given))
    other = attrs.evolve(given, pixels=255 - given.pixels)
    difference = (our_logits(mine, given) - our_logits(mine, other)).abs()
    assert float(difference[:2, -1].max()) > 1e-3
    assert float(difference[2].max()) < 1e-6, "the row without a picture; experts run rows together"


@each_family
def test_export_gives_transformers_the_logits_of_ours(family: str, tmp_path: Path) -> None:
    """Our model with other random weights, written as the first family that fits, loaded there, and read
    back here."""
    from forge_ckpt.hf.exporting import export_hf
    from forge_ckpt.hf.opening import open_model
    from forge_ckpt.hf.start import tensors_of
    from forge_ckpt.hf.weights import InMemory

    theirs(family).save_pretrained(tmp_path / "hf")
    opened = open_model(tmp_path / "hf")
    mine = ours(opened)
    randomise(mine, 3)
    source = attrs.evolve(opened, weights=InMemory(tensors_of(mine)), tokenizer=None)
    name, text = FAMILIES[family]
    assert export_hf(source, tmp_path / "out").model_type == name
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["text_config"]["model_type"] == text["model_type"]
    loaded, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    given = sample_for(loaded.config)
    assert_close(our_logits(mine, given), their_logits(loaded.eval(), given))
    assert_close(our_logits(ours(open_model(tmp_path / "out")), given), our_logits(mine, given))


def test_a_text_family_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    from forge_ckpt.errors import CheckpointError
    from forge_ckpt.hf.opening import open_model

    theirs("mixtral").save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    config = json.loads(path.read_text())
    config["text_config"]["model_type"] = "unheard_of"
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="a text model of type 'unheard_of' is not offered") as error:
        open_model(tmp_path / "hf")
    assert "mixtral" in error.value.hint
    assert "llama" in error.value.hint
