"""Families that see around a text model of another plugin, against transformers: logits both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import tomli
from paritykit import MLA, SEEING, assert_close, exported, loaded, ours, random_model, randomise
from vlmfamilies import (
    CLIP,
    IMAGE,
    TEXT,
    VISION,
    our_logits,
    sample_for,
    their_logits,
)

pytest.importorskip("transformers")
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
        {**MLA, "model_type": "deepseek_v3"},
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


def theirs(family: str) -> Any:
    name, text = FAMILIES[family]
    stands = "image_token_index" if name == "llava" else "image_token_id"
    around = {"vision_config": CLIP} if name == "llava" else IDEFICS
    return random_model(SEEING, name, **{**around, "text_config": {**TEXT, **text}, stands: IMAGE})


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
    from forge_ckpt.hf.opening import open_model

    theirs(family).save_pretrained(tmp_path / "hf")
    opened = open_model(tmp_path / "hf")
    mine = ours(opened)
    randomise(mine, 3)
    name, text = FAMILIES[family]
    assert exported(opened, mine, tmp_path / "out") == name
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["text_config"]["model_type"] == text["model_type"]
    model = loaded(SEEING, tmp_path / "out")
    given = sample_for(model.config)
    assert_close(our_logits(mine, given), their_logits(model, given))
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
