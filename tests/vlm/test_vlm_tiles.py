"""Images as tiles and blocks that ask them: arrangements, who sees what, and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_vlm_model import CLOSE, hidden_of, session_of
from torch import Tensor
from vlmkit import Tables, config_of
from vlmruns import of, run, same
from vlmsizes import MARKER, PACKED, TILED, write_sizes

from forge_core.contract import LayerContext
from forge_core.errors import ConfigError
from forge_core.loop.session import TrainingSession
from forge_core.plugins import Plugins
from forge_core.testing import run_tiny
from forge_core.testing.pool import WorkerPool
from forge_vlm.data.patches import pictures_in
from forge_vlm.data.pixels import prepared
from forge_vlm.fusions.gated_cross import last_images
from forge_vlm.geometry import TiledGeometry, shape_of

GEOMETRY = TiledGeometry(size=8, grid=2, tiles=4, dim=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sizes(tmp_path_factory.mktemp("tiles"))


def rows_of(session: TrainingSession, *numbers: int) -> dict[str, Tensor]:
    source = session.data.train.sources[0]  # type: ignore[attr-defined]
    rows = [source[number] for number in numbers]
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


@torch.no_grad()
def opened(session: TrainingSession) -> None:
    """Gates as after some training."""
    for name, parameter in session.model.named_parameters():
        if name.endswith("gate"):
            parameter.fill_(0.7)


@pytest.mark.parametrize(
    ("size", "arrangement", "inside"),
    [
        ((8, 8), (1, 1), (8, 8)),
        ((8, 16), (1, 2), (8, 16)),
        ((5, 7), (1, 1), (5, 8)),  # 8 / 7 larger: 5.7 pixels, cut to 5
        ((30, 33), (2, 2), (14, 16)),  # of all too small ones the one that shrinks least
        ((4, 40), (1, 4), (3, 32)),
    ],
)
def test_an_image_goes_where_it_changes_least(
    size: tuple[int, int], arrangement: tuple[int, int], inside: tuple[int, int]
) -> None:
    assert GEOMETRY.arrangement_of(*size) == arrangement
    assert GEOMETRY.inside(*size) == inside


def test_tiles_of_a_row_make_its_pictures_again(folder: Path) -> None:
    with session_of(folder, **TILED) as session:
        shape = shape_of(session.config)
        source: Any = session.data.train.sources[0]  # type: ignore[attr-defined]
        row = source[0]
        with Image.open(folder / "0.png") as one, Image.open(folder / "2.png") as other:
            expected = [prepared(picture, GEOMETRY) for picture in (one, other)]
        found = pictures_in(row, shape)
    assert row["grids"].tolist() == [[1, 1], [3, 1]]
    assert [each.shape for each in found] == [(3, 8, 8), (3, 24, 8)]
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert row["tokens"][:2].tolist() == [ord("x"), MARKER]
    assert (row["image_index"] == -1).all()
    assert not (row["targets"] == MARKER).any()


def test_a_token_sees_the_last_run_of_images_before_it() -> None:
    """Images at 0, 1 and 4 of one document and at 6 of another; slot 4 is empty."""
    marks = {
        "image_places": torch.tensor([[0, 1, 4, 6, 0]]),
        "image_documents": torch.tensor([[0, 0, 0, 1, -1]]),
        "present": torch.tensor([[True, True, True, True, False]]),
    }
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])
    seen = last_images(LayerContext(documents=documents), marks, 8, torch.device("cpu"))
    expected = [{0}, {0, 1}, {0, 1}, {0, 1}, {2}, set(), {3}, {3}]
    assert [set(row.nonzero().flatten().tolist()) for row in seen[0]] == expected


def test_it_is_the_text_model_until_gates_open(folder: Path) -> None:
    with session_of(folder, **TILED) as session:
        batch = rows_of(session, 0, 1)
        changed = {**batch, "tiles": 255 - batch["tiles"]}
        assert torch.equal(hidden_of(session, batch), hidden_of(session, changed))
        opened(session)
        found = hidden_of(session, batch)
        assert not torch.allclose(found, hidden_of(session, changed))


def test_rows_equal_each_alone_and_tiles_that_are_not_there_change_nothing(folder: Path) -> None:
    with session_of(folder, **TILED) as session:
        opened(session)
        batches = [rows_of(session, number) for number in range(3)]
        alone = [hidden_of(session, batch)[batch["valid"]] for batch in batches]
        together = rows_of(session, 0, 1, 2)
        found = hidden_of(session, together)
        torch.testing.assert_close(found[together["valid"]], torch.cat(alone), **CLOSE)
        count = together["grids"].prod(-1, keepdim=True)
        room = torch.arange(4) >= count
        tiles = torch.where(room[..., None, None, None], 77, together["tiles"]).to(torch.uint8)
        changed = hidden_of(session, together, tiles=tiles)
        torch.testing.assert_close(changed[together["valid"]], found[together["valid"]], **CLOSE)


def test_a_device_that_is_not_asked_gives_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots without an image run along, as where the host does not know which they are."""
    with session_of(folder, **TILED) as session:
        opened(session)
        batch = rows_of(session, 0, 1, 2)
        found = hidden_of(session, batch)
        monkeypatch.setattr("forge_vlm.encoders.packed.on_host", lambda x: False)
        other = hidden_of(session, batch)
        torch.testing.assert_close(other[batch["valid"]], found[batch["valid"]], **CLOSE)


def test_training_moves_every_weight(folder: Path) -> None:
    plugins = Plugins()
    with session_of(folder, **TILED) as session:
        before = {name: p.detach().clone() for name, p in session.freeze.named.items()}
    done = run_tiny(config_of(folder, plugins, **TILED), plugins, steps=6)
    moved = {name for name, value in done.weights.items() if not torch.equal(value, before[name])}
    assert moved == set(before)


@pytest.mark.parametrize("kind", ["packed", "tiled"])
def test_half_precision_is_near_the_full(folder: Path, kind: str) -> None:
    losses = {}
    for dtype in ("fp32", "bf16"):
        plugins = Plugins()
        tables = {**(PACKED if kind == "packed" else TILED), "train": {"dtype": dtype, "seq_len": 40}}
        losses[dtype] = run_tiny(config_of(folder, plugins, **tables), plugins, steps=3).losses
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)


def test_what_does_not_fit_is_refused_by_name(folder: Path) -> None:
    def refused(match: str, **vlm: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            config_of(folder, Plugins(), **{**TILED, "vlm": {**TILED["vlm"], **vlm}})

    refused("are no blocks of model.n_layers = 2", gated_cross_attention={"layers": [2]})
    refused("has to mark an image", image_token_id=300)
    refused("stay as many as they are", connector={"name": "pixel_shuffle"})


LAYOUTS: dict[str, tuple[int, Tables]] = {
    "fsdp": (2, {}),
    "sequence": (1, {"distributed": {"tp": 2, "sequence_parallel": True}}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["packed", "tiled"])
def test_ranks_equal_one_process(pool2: WorkerPool, folder: Path, kind: str, layout: str) -> None:
    more = {"packed": PACKED, "tiled": TILED}[kind]
    more = {**more, "train": {"seq_len": 40}}
    expected = run(of(folder, **more))
    ranks, changed = LAYOUTS[layout]
    for found in pool2.run(run, of(folder, ranks, 1, **more, **changed)):
        same(found, expected)
