"""Models that see, gone on from: exact on either side of a stage, refused where freezing differs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from vlmkit import config_of, mixed_records, write_samples

from forge_core.errors import ForgeError
from forge_core.plugins import Plugins
from forge_core.testing import run_tiny
from forge_core.testing.pool import WorkerPool

pytestmark = pytest.mark.packages("ckpt", "vlm")
TOKENS = "data/text_tokens_trained"
STAGES: dict[str, Any] = {"stages": [{"start_step": 4, "modules": []}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples"), mixed_records())


def train(folder: Path, place: Path, steps: int, **more: dict[str, Any]) -> Any:
    plugins = Plugins()
    tables: dict[str, Any] = {
        "run": {"name": "one"},
        "checkpoint": {"interval": 1, "mode": "sync"},
        "train": {"max_steps": 6, **more.pop("train", {})},
        "scheduler": {"name": "constant"},
        **more,
    }
    return run_tiny(config_of(folder, plugins, **tables), plugins, steps=steps, folder=place)


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_resumed_on_either_side_of_a_stage(folder: Path, tmp_path: Path, stop: int) -> None:
    straight = train(folder, tmp_path / "straight", 6, freeze=STAGES)
    train(folder, tmp_path / "two", stop, freeze=STAGES)
    resumed = train(folder, tmp_path / "two", 6, freeze=STAGES)
    assert resumed.losses == straight.losses[stop:]
    assert resumed.metric(TOKENS) == straight.metric(TOKENS)  # of the whole run, with the lines before
    for name, weight in straight.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


def on_this_rank(folder: str, place: str, steps: int, ranks: int) -> dict[str, Any]:
    """A run that unfreezes its encoder, as plain data."""
    done = train(Path(folder), Path(place), steps, freeze=STAGES, train={"batch_size": 4 // ranks})
    return {"losses": done.losses, "weights": dict(done.weights), "tokens": done.metric(TOKENS)}


@pytest.mark.parametrize("stop", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_resumed_by_two_ranks_and_by_one(pool2: WorkerPool, folder: Path, tmp_path: Path, stop: int) -> None:
    """Saved before the stage and after it by two ranks; two go on exactly, one nearly so."""
    straight = pool2.run(on_this_rank, str(folder), str(tmp_path / "straight"), 6, 2)
    for name, weight in straight[0]["weights"].items():
        assert torch.equal(straight[1]["weights"][name], weight), name
    pool2.run(on_this_rank, str(folder), str(tmp_path / "two"), stop, 2)
    shutil.copytree(tmp_path / "two", tmp_path / "one", symlinks=True)
    for found in pool2.run(on_this_rank, str(folder), str(tmp_path / "two"), 6, 2):
        assert found["losses"] == straight[0]["losses"][stop:]
        assert found["tokens"][-1] == straight[0]["tokens"][-1]
        for name, weight in straight[0]["weights"].items():
            assert torch.equal(found["weights"][name], weight), name
    alone = on_this_rank(str(folder), str(tmp_path / "one"), 6, 1)
    assert alone["losses"] == pytest.approx(straight[0]["losses"][stop:], rel=1e-9)
    for name, weight in straight[0]["weights"].items():
        torch.testing.assert_close(alone["weights"][name], weight, rtol=1e-9, atol=1e-9, msg=name)


def test_another_freeze_of_the_update_that_was_saved_is_refused(folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path, 2)
    with pytest.raises(ForgeError, match="encoder was frozen in update 2"):
        train(folder, tmp_path, 4, vlm={"encoder": {"frozen": False}})


def test_other_parameters_of_a_part_that_was_frozen_in_part_are_refused(folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path, 2, freeze={"modules": ["decoder.embed"]})
    with pytest.raises(ForgeError, match="other parameters of decoder were frozen in update 2"):
        train(folder, tmp_path, 4, freeze={"modules": ["decoder.head"]})
    same = {"modules": ["decoder.embed.*", "decoder.embed.weight"]}
    assert len(train(folder, tmp_path, 3, freeze=same).losses) == 1


def test_a_schedule_that_differs_later_is_taken(folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path, 2)
    done = train(folder, tmp_path, 5, freeze=STAGES)
    assert len(done.losses) == 3


def test_weights_of_a_text_model_are_where_a_decoder_starts(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 257}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    theirs.save_pretrained(tmp_path)
    plugins = Plugins()
    tables: dict[str, Any] = {"model": {"init_from": str(tmp_path), "norm_eps": 1e-6}, "checkpoint": {}}
    from forge_core.testing import tiny_session

    with tiny_session(config_of(folder, plugins, **tables), plugins) as session:
        decoder: Any = session.model.decoder
        found = decoder.layers["1"].mlp.down_proj.weight
        expected = theirs.state_dict()["model.layers.1.mlp.down_proj.weight"]
        assert torch.equal(found, expected.to(found.dtype))
        assert torch.equal(decoder.embed.weight, theirs.state_dict()["model.embed_tokens.weight"].double())
    tables |= {"vlm": {"fusion": "mot", "mot": {"copy_text": True}}, "checkpoint": {"init_partial": True}}
    with tiny_session(config_of(folder, plugins, **tables), plugins) as session:
        block: Any = session.model.decoder.layers["1"]  # type: ignore[union-attr, index]
        for found in (block.mlp.down_proj.weight, block.mlp.image.down_proj.weight):
            assert torch.equal(found, expected.to(found.dtype))
