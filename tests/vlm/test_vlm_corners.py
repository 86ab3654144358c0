"""Corners where several things meet: packed rows that are asked, parts of others that say too little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_vlm_model import session_of
from torch import nn
from vlmkit import config_of, write_samples

from forge_core.config import key, table
from forge_core.contract import Component
from forge_core.errors import ConfigError, DataError, ForgeError
from forge_core.plugins import Plugins
from forge_core.testing import isolated_plugins, plugin_object
from forge_vlm.connectors import ConnectorSpec
from forge_vlm.encoders.keys import read_picture_keys
from forge_vlm.encoders.weights import TowerFiles
from forge_vlm.evaluation.answers import ExactMatch
from forge_vlm.evaluation.run import Evaluation
from forge_vlm.flops import encoder_flops
from forge_vlm.generate import questions_of
from forge_vlm.generator import VlmGenerator
from forge_vlm.problems import all_problems
from forge_vlm.sight import checked

PACKED: dict[str, Any] = {
    "data": {"vlm/images": {"pack": True, "unreadable": "mask"}},
    "vlm": {"max_images": 4},
    "train": {"seq_len": 64},
}


def test_a_packed_row_asks_its_first_sample_alone(tmp_path: Path) -> None:
    """Its label was taken away, so nobody is asked: not the second sample, after the first one's tokens."""
    records = [
        {"image": "lost.png", "prompt": "first? ", "answer": "one"},
        {"image": "0.png", "prompt": "second? ", "answer": "two"},
        {"image": "1.png", "prompt": "third? ", "answer": "three"},
        {"image": "2.png", "prompt": "fourth? ", "answer": "four"},
    ]
    write_samples(tmp_path, records)
    with session_of(tmp_path, **PACKED) as session:
        source: Any = session.data.train.sources[0]  # type: ignore[attr-defined]
        rows = [{k: torch.as_tensor(v)[None] for k, v in source[n].items()} for n in range(len(source))]
    batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    assert [source.documents_of(n)[0] for n in range(len(source))] == ["line 1", "line 4"]
    prompts, answers = questions_of(batch)
    assert answers[0] == []
    assert bytes(answers[1][:-1]) == b"four"
    assert prompts.images is not None
    assert prompts.images["present"].sum(1).tolist() == [0, 1]


TINY: dict[str, Any] = {
    "patch_size": 4,
    "min_pixels": 64,
    "dim": 16,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 24,
}


def test_plain_text_is_not_asked(tmp_path: Path) -> None:
    """A set of text beside one of questions: exact match is about the questions, and so is the sample."""
    seen, text = tmp_path / "seen", tmp_path / "text"
    seen.mkdir()
    text.mkdir()
    (text / "text.txt").write_text("the quick brown fox " * 200, encoding="utf-8")
    write_samples(seen, [{"image": f"{n % 6}.png", "prompt": f"q{n} ", "answer": "a"} for n in range(12)])
    sets: list[dict[str, Any]] = [
        {"name": "text", "source": "text", "path": str(text)},
        {"name": "seen", "source": "vlm/images", "path": str(seen)},
    ]
    tables: dict[str, Any] = {
        "vlm": {"answer_tokens": 2},
        "eval": {"sets": sets, "steps": 0},
        "model": {"vocab_size": 257},
    }
    with session_of(seen, **tables) as session:
        metric = ExactMatch(session, None)
        found = Evaluation({"exact_match": metric})
        asked = [metric.measure(each)[1] for each in found._seen(session)]
        assert len(asked) > 6  # both sets have batches
        assert sum(asked) == 12
        assert VlmGenerator().sample(session).count("[picture ") == 4


def test_an_encoder_of_packed_patches_weighs_what_a_sequence_holds(tmp_path: Path) -> None:
    """The share of work that stages count with: of the patches that `max_patches` lets in."""
    write_samples(tmp_path, [{"image": "0.png", "answer": "a"}] * 4)
    encoder = {"name": "patches", "patches": {**TINY, "max_pixels": 256}}
    vlm = {"encoder": encoder, "connector": {"name": "patch_merger"}, "max_patches": 16}
    with session_of(tmp_path, vlm=vlm, train={"seq_len": 32}) as session:
        assert session.model.encoder.active_share == 16 / 32  # type: ignore[union-attr]


@table
class SevenOptions:
    """Seven tokens of an image."""

    n_heads: int | None = key(None, help="Of the decoder's width, not the encoder's.")

    def tokens(self, grid: int) -> int:
        return 7


class Seven(nn.Module):
    """(N, T, D_in) -> (N, 7, D_out)."""

    def __init__(self, spec: ConnectorSpec, options: SevenOptions) -> None:
        super().__init__()
        self.proj = nn.Linear(spec.in_dim, spec.out_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.proj(x[:, :1].expand(-1, 7, -1))
        return y


def with_seven() -> Plugins:
    import forge_vlm.plugin

    target, options = f"{__name__}:Seven", f"{__name__}:SevenOptions"
    parts = [Component(category="vlm_connector", name="seven", target=target, options=options)]
    return isolated_plugins({"vlm": forge_vlm.plugin, "mine": plugin_object(forge_components=lambda: parts)})


@pytest.mark.parametrize("heads", [None, 3])
def test_heads_of_a_connector_of_somebody_else_are_its_own(tmp_path: Path, heads: int | None) -> None:
    """Whatever they divide: the encoder is 16 wide."""
    options = {} if heads is None else {"mine/seven": {"n_heads": heads}}
    config = config_of(
        tmp_path,
        with_seven(),
        vlm={"connector": {"name": "mine/seven", **options}},
        mine={},
        train={"seq_len": 64},
    )
    assert [problem for problem in all_problems(config) if not problem.at_start] == []


def test_tokens_that_are_no_square_stand_in_a_row(tmp_path: Path) -> None:
    """Seven places along the width, and text behind them goes on at 7."""
    from forge_core.testing import tiny_session

    write_samples(tmp_path, [{"image": "0.png", "answer": "abc"}] * 4)
    tables: dict[str, Any] = {
        "vlm": {"connector": {"name": "mine/seven"}},
        "model": {"rope_sections": [1, 1, 2]},
        "mine": {},
    }
    plugins = with_seven()
    with tiny_session(config_of(tmp_path, plugins, **tables), plugins) as session:
        model: Any = session.model
        source: Any = session.data.train.sources[0]  # type: ignore[attr-defined]
        row = {name: torch.as_tensor(value)[None] for name, value in source[0].items()}
        assert model.sight.grids(row)[0, 0].tolist() == [1, 1, 7]
        assert model.sight.grids(row)[0, 0].prod() == int((row["image_index"] >= 0).sum())


def test_a_part_that_gives_no_tensor_is_refused() -> None:
    class Named(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"last_hidden_state": x}

    with pytest.raises(ForgeError, match="the encoder named gives a dict, and a tensor is expected"):
        checked("encoder", "named", Named(), (torch.empty(1, 4, 16),), (4, 16))


@pytest.mark.parametrize("name", ["clip", "siglip", "idefics3"])
def test_heads_divide_a_tower(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"vlm\.encoder\.{name}\.dim: 100 is no multiple of n_heads = 8"):
        config_of(tmp_path, Plugins(), vlm={"encoder": {"name": name, name: {"dim": 100, "n_heads": 8}}})


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_index_of_weights_that_is_damaged_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(DataError, match=r"cannot read .*model\.safetensors\.index\.json"):
        TowerFiles(str(tmp_path), ["a"])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"resample": 9}, "resized by 9"),
        ({"resample": "cubic"}, "resized by 'cubic'"),
        ({"do_rescale": False}, "rescaled by 1.0"),
        ({"size": [224, 224]}, r"brought to \[224, 224\]"),
    ],
)
def test_pictures_that_are_prepared_in_other_ways_are_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        read_picture_keys(said, 224)
    nothing = {"resample": None, "size": None, "rescale_factor": None, "image_mean": None}
    assert read_picture_keys(nothing, 224) == {}


def test_an_encoder_of_somebody_else_says_itself_what_it_takes() -> None:
    """Whatever its keys are called."""

    class Theirs:
        image_size, hidden_dim = 224, 64

        def forward_flops(self) -> float:
            return 7.0

    assert encoder_flops(Theirs()) == 7.0
