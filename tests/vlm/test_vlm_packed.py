"""Images in sizes of their own: how they are cut, what each is alone and among others, and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_vlm_model import CLOSE, hidden_of, session_of
from torch import Tensor
from vlmkit import config_of, write_samples
from vlmsizes import PATCHES, records_in_turn

from forge_core.errors import ConfigError, DataError
from forge_core.loop.session import TrainingSession
from forge_core.plugins import Plugins
from forge_core.testing import run_tiny
from forge_vlm.connectors import AttentionalPool, AveragePool, ConnectorSpec, PixelShuffle
from forge_vlm.data.patches import frames_of, patches_of
from forge_vlm.encoders.packed import Segments, layout_of, windows
from forge_vlm.encoders.patches import PatchMerger
from forge_vlm.geometry import ImageGeometry, PackedGeometry, shape_of
from forge_vlm.options import AttentionalPoolOptions, AveragePoolOptions, PixelShuffleOptions
from forge_vlm.options_packed import MergerOptions

SIZES = ((16, 8), (8, 16), (24, 8), (9, 17), (8, 8), (40, 40))
"""Heights and widths of the pictures 0.png, 1.png, ...."""
ENCODER = {**PATCHES, "frames": 1}
PACKED: dict[str, dict[str, Any]] = {
    "vlm": {
        "max_images": 2,
        "encoder": {"name": "patches", "frozen": False, "patches": ENCODER},
        "connector": {"name": "patch_merger"},
    },
    "model": {"rope_sections": [2, 1, 1]},
    "train": {"seq_len": 40},
}
GEOMETRY = PackedGeometry(patch=4, side=2, dim=16, least=64, most=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = write_samples(tmp_path_factory.mktemp("sizes"), records_in_turn(12))
    random = np.random.default_rng(0)
    for number, size in enumerate(SIZES):
        pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(found / f"{number}.png")
    return found


def rows_of(session: TrainingSession, *numbers: int) -> dict[str, Tensor]:
    source = session.data.train.sources[0]  # type: ignore[attr-defined]
    rows = [source[number] for number in numbers]
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((16, 8), (4, 2)),
        ((9, 17), (2, 4)),  # to whole squares of 8 x 8 pixels
        ((3, 3), (2, 2)),  # enlarged to the least
        ((40, 40), (4, 4)),  # shrunk to the most
        ((100, 10), (12, 2)),  # 48 x 8 pixels: longer than wide as it was, up to whole squares
    ],
)
def test_images_keep_their_shape_between_the_limits(size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert GEOMETRY.grid_of(*size) == grid


def test_an_image_far_longer_than_wide_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 200 times"):
        GEOMETRY.grid_of(1, 201)


def test_patches_stand_in_squares_and_the_layout_says_where() -> None:
    """Every pixel says its place; the layout of the patches has to agree with what they hold."""
    height, width = 16, 24
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    pixels = np.stack([rows, columns, rows]).astype(np.uint8)
    patches = patches_of(pixels[None], GEOMETRY)
    layout = layout_of(torch.tensor([[[1, 2, 2], [1, 4, 6], [0, 0, 0]]]), 32, 2)
    first = torch.from_numpy(patches.reshape(24, 3, 16)[:, :, 0]).long()
    assert torch.equal(layout.rows[0, 4:28] * 4, first[:, 0])
    assert torch.equal(layout.columns[0, 4:28] * 4, first[:, 1])
    assert layout.images[0].tolist() == [0] * 4 + [32] * 24 + [-1] * 4
    assert np.array_equal(frames_of(patches, (1, 4, 6), GEOMETRY), pixels[None])


@pytest.mark.parametrize("windowed", [False, True])
def test_segments_equal_one_mask(windowed: bool) -> None:
    layout = layout_of(torch.tensor([[[1, 4, 6], [1, 2, 2]], [[2, 2, 2], [0, 0, 0]]]), 28, 2)
    numbers = windows(layout, 3) if windowed else layout.images
    q, k, v = torch.randn(3, 2, 28, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = (numbers[:, :, None] == numbers[:, None, :])[:, None]
    one, two, three = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(one, two, three, attn_mask=mask)
    segments = Segments(numbers)
    torch.testing.assert_close(segments.attend(q, k, v), expected.transpose(1, 2), **CLOSE)
    assert len(segments.groups) > 1
    segments.mask = mask
    torch.testing.assert_close(segments.attend(q, k, v), expected.transpose(1, 2), **CLOSE)


def test_segments_of_two_rows_stay_apart_whatever_their_numbers() -> None:
    numbers = torch.tensor([[-8, 0, 4], [-14, -14, -14]])
    assert len(Segments(numbers).back) == 6
    lengths = sorted(len(part) for group in Segments(numbers).groups for part in group)
    assert lengths == [1, 1, 1, 3]


def test_every_image_has_its_own_number_of_tokens(folder: Path) -> None:
    with session_of(folder, **PACKED) as session:
        batch = rows_of(session, 0, 1, 2)
        assert batch["grids"].tolist() == [
            [[1, 4, 2], [1, 6, 2]],
            [[1, 2, 4], [0, 0, 0]],
            [[0, 0, 0], [0, 0, 0]],
        ]
        assert (batch["image_index"] >= 0).sum(1).tolist() == [5, 2, 0]
        assert batch["patches"].shape == (3, shape_of(session.config).patches, 48)
        for row, count in enumerate((20, 8, 0)):
            assert not batch["patches"][row, count:].any()


def test_rows_of_many_sizes_equal_each_alone_and_packed_ones_unpacked(folder: Path) -> None:
    with session_of(folder, **PACKED) as session:
        alone = []
        for number in range(6):
            batch = rows_of(session, number)
            alone.append(hidden_of(session, batch)[batch["valid"]])
        together = rows_of(session, *range(6))
        torch.testing.assert_close(hidden_of(session, together)[together["valid"]], torch.cat(alone), **CLOSE)
    packing = {**PACKED, "data": {"vlm/images": {"pack": True}}, "train": {"seq_len": 80}}
    packing["vlm"] = {**PACKED["vlm"], "max_images": 4}
    with session_of(folder, **packing) as session:
        source: Any = session.data.train.sources[0]  # type: ignore[attr-defined]
        named = [name for row in range(2) for name in source.documents_of(row)]
        assert len(named) > 3
        batch = rows_of(session, 0, 1)
        found = hidden_of(session, batch)[batch["valid"]]
    order = [int(name.removeprefix("line ")) - 1 for name in named]
    expected = [alone[number] for number in order if number < 6]
    torch.testing.assert_close(found[: sum(map(len, expected))], torch.cat(expected), **CLOSE)


@pytest.mark.parametrize("fusion", ["joint", "cross_attention", "mot"])
def test_every_fusion_gives_what_each_row_gives_alone(folder: Path, fusion: str) -> None:
    """With weights of a model that has learnt something; tokens of an image see each other where they can."""
    options = {"cross_attention": {"every": 1}}.get(fusion, {"bidirectional": "image"})
    more = {**PACKED, "vlm": {**PACKED["vlm"], "fusion": fusion, fusion: options}}
    with session_of(folder, **more) as session:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in session.model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        batches = [rows_of(session, number) for number in range(4)]
        alone = [hidden_of(session, batch)[batch["valid"]] for batch in batches]
        together = rows_of(session, *range(4))
        found = hidden_of(session, together)
        torch.testing.assert_close(found[together["valid"]], torch.cat(alone), **CLOSE)
        # the second image of a row, and nothing else of it
        changed = together["patches"].clone()
        first = int(together["grids"][0, 0].prod())
        changed[0, first : first + int(together["grids"][0, 1].prod())] += 7
        other = hidden_of(session, together, patches=changed)
        place = int(together["image_places"][0, 1])
        torch.testing.assert_close(other[0, :place], found[0, :place], **CLOSE)
        assert not torch.allclose(other[0, place:], found[0, place:])
        torch.testing.assert_close(other[1:], found[1:], **CLOSE)


def test_files_and_arrays_of_any_size_can_be_asked_about(folder: Path) -> None:
    from forge_vlm.generator import VlmGenerator

    with session_of(folder, model={**PACKED["model"], "max_seq_len": 64}, vlm=PACKED["vlm"]) as session:
        with Image.open(folder / "3.png") as opened:
            pixels = np.asarray(opened).transpose(2, 0, 1)
        asked = [{"prompt": "a <image> b", "images": [each]} for each in (folder / "3.png", pixels)]
        one, other = VlmGenerator().generate(session, asked, max_new_tokens=4, temperature=0.0)
        assert one == other


def test_which_image_a_token_is_of(folder: Path) -> None:
    from forge_vlm.sight import sight_of

    with session_of(folder, **PACKED) as session:
        batch, sight = rows_of(session, 0, 1), sight_of(shape_of(session.config))
    assert sight.blocks(batch)[:, :9].tolist() == [
        [-1, 0, 0, -1, -1, 1, 1, 1, -1],  # x, 2 tokens, y0, 3 tokens
        [0, 0, -1, -1, -1, -1, -1, -1, -1],
    ]
    assert sight.owners(batch).tolist() == [[0, 0, 1, 1, 1, -1, -1, -1], [0, 0, -1, -1, -1, -1, -1, -1]]


def test_text_goes_on_behind_the_longer_side_of_an_image(folder: Path) -> None:
    """x, an image of 1 x 2 tokens, y3, an image of 2 x 2, then "? ": worked out by hand."""
    from forge_vlm.axes import axis_positions
    from forge_vlm.sight import sight_of

    with session_of(folder, **PACKED) as session:
        batch = rows_of(session, 3)
        grids = sight_of(shape_of(session.config)).grids(batch)
        assert grids is not None
        found, behind = axis_positions(batch["positions"], batch["documents"], batch, grids)
    assert found[0, 0, :11].tolist() == [0, 1, 1, 3, 4, 5, 5, 5, 5, 7, 8]
    assert found[0, 1, :11].tolist() == [0, 1, 1, 3, 4, 5, 5, 6, 6, 7, 8]
    assert found[0, 2, :11].tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    assert behind.tolist() == [[2]]


def test_padding_and_other_rows_change_nothing(folder: Path) -> None:
    with session_of(folder, **PACKED) as session:
        batch = rows_of(session, 0, 1)
        found = hidden_of(session, batch)
        room = torch.arange(batch["patches"].shape[1])[None] >= batch["grids"].prod(-1).sum(-1, keepdim=True)
        patches = torch.where(room[..., None], 77, batch["patches"]).to(torch.uint8)
        changed = hidden_of(session, batch, patches=patches)
        torch.testing.assert_close(changed[batch["valid"]], found[batch["valid"]], **CLOSE)
        other = hidden_of(session, batch, patches=255 - batch["patches"])
        assert not torch.allclose(other[batch["valid"]], found[batch["valid"]])


def test_a_device_that_is_not_asked_gives_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding runs along and one mask keeps images apart, as where the host does not know their sizes."""
    with session_of(folder, **PACKED) as session:
        batch = rows_of(session, 0, 1, 2)
        found = hidden_of(session, batch)
        monkeypatch.setattr("forge_vlm.encoders.packed.on_host", lambda x: False)
        other = hidden_of(session, batch)
        torch.testing.assert_close(other[batch["valid"]], found[batch["valid"]], **CLOSE)


def test_training_moves_every_weight_and_a_run_without_images_works(folder: Path, tmp_path: Path) -> None:
    plugins = Plugins()
    with session_of(folder, **PACKED) as session:
        before = {name: p.detach().clone() for name, p in session.freeze.named.items()}
    done = run_tiny(config_of(folder, plugins, **PACKED), plugins, steps=3)
    moved = {name for name, value in done.weights.items() if not torch.equal(value, before[name])}
    assert moved == set(before)
    text = write_samples(tmp_path, [{"answer": f"b{n}"} for n in range(12)])
    assert all(np.isfinite(run_tiny(config_of(text, plugins, **PACKED), plugins, steps=2).losses))


def test_what_does_not_fit_is_refused_by_name(folder: Path) -> None:
    plugins = Plugins()

    def refused(match: str, **vlm: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            config_of(folder, plugins, **{**PACKED, "vlm": {**PACKED["vlm"], **vlm}})

    refused("are of one size", encoder={"name": "vit"}, connector={"name": "mlp"}, max_patches=64)
    refused("the largest image has 16 patches, more than 12", max_patches=12)
    refused("2 images of up to 4 tokens leave no room", max_images=12)


SQUARES: dict[str, tuple[type[torch.nn.Module], Any]] = {
    "pixel_shuffle": (PixelShuffle, PixelShuffleOptions()),
    "average_pool": (AveragePool, AveragePoolOptions()),
    "attentional_pool": (AttentionalPool, AttentionalPoolOptions()),
    "patch_merger": (PatchMerger, MergerOptions()),
}
"""Connectors that join squares of 2 x 2 tokens."""


@pytest.mark.parametrize("name", SQUARES)
def test_connectors_join_the_squares_of_a_grid_and_of_patches_alike(name: str) -> None:
    """4 x 4 tokens row by row, and square after square as patches stand."""
    build, options = SQUARES[name]
    sizes = {"in_dim": 8, "out_dim": 6}
    torch.manual_seed(0)
    grid, patches = (build(ConnectorSpec(**sizes, grid=side), options).double() for side in (4, 0))
    patches.load_state_dict(grid.state_dict())
    x = torch.randn(2, 16, 8, dtype=torch.float64)
    order = torch.arange(16).view(2, 2, 2, 2).transpose(1, 2).flatten()
    torch.testing.assert_close(patches(x[:, order]), grid(x))
    assert grid(x).shape == (2, 4, 6)


@pytest.mark.parametrize("name", SQUARES)
def test_images_of_all_sizes_go_through_connectors_of_squares(folder: Path, name: str) -> None:
    more = {**PACKED, "vlm": {**PACKED["vlm"], "connector": {"name": name}}}
    with session_of(folder, **more) as session:
        alone = [rows_of(session, number) for number in range(3)]
        expected = torch.cat([hidden_of(session, batch)[batch["valid"]] for batch in alone])
        together = rows_of(session, *range(3))
        found = hidden_of(session, together)
        torch.testing.assert_close(found[together["valid"]], expected, **CLOSE)
        other = hidden_of(session, together, patches=255 - together["patches"])
        assert not torch.allclose(other[0], found[0])


def test_a_merger_behind_an_encoder_of_one_size(folder: Path) -> None:
    vit = {"image_size": 16, "patch_size": 4, "dim": 16, "n_layers": 1, "n_heads": 2}
    vlm = {"max_images": 2, "encoder": {"name": "vit", "vit": vit}, "connector": {"name": "patch_merger"}}
    with session_of(folder, vlm=vlm, train={"seq_len": 40}) as session:
        assert shape_of(session.config).tokens == 4
        batch = rows_of(session, 0, 1, 2)
        assert (batch["image_index"] >= 0).sum(1).tolist() == [8, 4, 0]
        assert bool(hidden_of(session, batch).isfinite().all())


def test_connectors_that_do_not_say_how_they_join_are_refused() -> None:
    with pytest.raises(ValueError, match="works on square grids"):
        GEOMETRY.behind(object())
    with pytest.raises(ValueError, match="does not divide its 3 x 3 tokens"):
        ImageGeometry(size=12, grid=3, dim=16).behind(MergerOptions())


def test_images_with_too_many_patches_together_are_named(folder: Path) -> None:
    few = {**PACKED, "vlm": {**PACKED["vlm"], "max_patches": 16}}
    message = r"data\.jsonl:1: has images of 20 patches, more than vlm\.max_patches = 16"
    with pytest.raises(DataError, match=message), session_of(folder, **few):
        pass
