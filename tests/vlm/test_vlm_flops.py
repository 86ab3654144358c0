"""FLOPs of seeing by numbers worked out by hand, and what runs say of images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vlmkit import TOWER, config_of, merged, mixed_records, tables, write_samples

from forge_core.config.tables import ModelConfig
from forge_core.loop.flops import flops_of
from forge_core.plugins import Plugins
from forge_core.testing import WorkerPool, run_tiny, tiny_config
from forge_vlm.counts import PictureCounts
from forge_vlm.flops import encoder_flops, flops_of_seeing
from forge_vlm.geometry import shape_of
from forge_vlm.options import ClipOptions, SiglipOptions, VitOptions
from forge_vlm.options_tiled import TilesOptions


def test_a_vision_transformer_by_hand() -> None:
    """4 tokens: a patch is 48 x 16 weights; a block has 4 * 16 * 16 + 2 * 16 * 32 = 2048, and scores and
    sums of 4 x 4 x 16 each."""
    patches = 2 * 4 * 48 * 16
    block = 2 * 4 * 2048 + 2 * 2 * 4 * 4 * 16
    assert encoder_flops(VitOptions(**TOWER)) == patches + 2 * block == 40960
    assert encoder_flops(SiglipOptions(**TOWER)) == patches + 2 * block


def test_clip_by_hand() -> None:
    """Its class token is a fifth token, and the states before the last block are those that are taken."""
    assert encoder_flops(ClipOptions(**TOWER)) == 2 * 4 * 48 * 16 + (2 * 5 * 2048 + 4 * 5 * 5 * 16)
    assert encoder_flops(ClipOptions(**TOWER, layer=None)) == 2 * 4 * 48 * 16 + 2 * (
        2 * 5 * 2048 + 4 * 5 * 5 * 16
    )


def test_known_towers() -> None:
    """CLIP ViT-B/32 at 224 pixels takes 4.4 thousand million multiply-adds."""
    assert encoder_flops(ClipOptions(layer=None)) / 2 == pytest.approx(4.4e9, rel=0.01)
    assert encoder_flops(SiglipOptions()) / 2 == pytest.approx(17.5e9, rel=0.02)


def test_tiles_by_hand() -> None:
    """Two tiles of 4 patches and a token for the whole: 10 tokens see each other in 2 + 1 blocks."""
    tiled = TilesOptions(**TOWER, n_global_layers=1, max_tiles=2, taken=[0])
    assert encoder_flops(tiled) == 2 * 8 * 48 * 16 + 3 * (2 * 10 * 2048 + 4 * 10 * 10 * 16)


def trains(*names: str) -> Callable[[str], bool]:
    return lambda name: name in names


def everything(name: str) -> bool:
    return True


@pytest.mark.parametrize("name", ["vit", "clip", "siglip"])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_run_counts_its_tower(tmp_path: Path, name: str, frozen: bool) -> None:
    options = {**TOWER, **({"layer": -1} if name == "clip" else {})}
    vlm = {"max_images": 3, "encoder": {"name": name, "frozen": frozen, name: options}}
    config = config_of(tmp_path, Plugins(), vlm=vlm)
    kind = {"vit": VitOptions, "clip": ClipOptions, "siglip": SiglipOptions}[name]
    tower = encoder_flops(kind(**options)) * (1 if frozen else 3)
    # two matrices of 16 x 16 over 4 tokens; the first needs no gradient of what a frozen encoder gives
    connector = 2 * 4 * 16 * 16 * ((2 if frozen else 3) + 3)
    found = flops_of_seeing(config, trains("connector") if frozen else everything)
    assert found.counted == {"images": pytest.approx(tower + connector)}
    assert found.expected == pytest.approx(3 * (tower + connector) / 32)


def test_blocks_of_cross_attention_count(tmp_path: Path) -> None:
    """One block of width 16: queries and outputs 512 weights, an MLP of 1536, 8 visual tokens to look at."""
    vlm = {"fusion": "cross_attention", "cross_attention": {"every": 2}}
    found = flops_of_seeing(config_of(tmp_path, Plugins(), vlm=vlm), everything)
    without = flops_of_seeing(config_of(tmp_path, Plugins()), everything)
    assert found.token == 6 * (512 + 1536)
    assert found.counted["looked_at"] == 12 * 16
    assert found.counted["images"] - without.counted["images"] == 6 * 512 * 4
    more = found.expected - without.expected
    assert more == pytest.approx(6 * (512 + 1536) + 12 * 8 * 16 + 6 * 512 * 8 / 32)


@pytest.mark.parametrize(
    ("training", "first", "rest"),
    [((), 1, 1), (("connector",), 2, 3), (("encoder",), 2, 2), (("encoder", "connector"), 3, 3)],
)
def test_what_trains_decides_how_often_matrices_run(
    tmp_path: Path, training: tuple[str, ...], first: int, rest: int
) -> None:
    """Forward, the gradient of a trained matrix, and that of its input where something trains before it."""
    vlm = {"encoder": {"name": "vit", "vit": TOWER}}
    found = flops_of_seeing(config_of(tmp_path, Plugins(), vlm=vlm), trains(*training))
    connector = 2 * 4 * 16 * 16
    assert found.counted["images"] == 40960 * (3 if "encoder" in training else 1) + connector * (first + rest)


def images(length: int, *slots: tuple[int, int], **more: Any) -> dict[str, Any]:
    """A batch of one row of `length` tokens with images at (place, document)."""
    places, documents = ([slot[i] for slot in slots] for i in (0, 1))
    return {
        "targets": torch.zeros(1, length, dtype=torch.int64),
        "present": torch.tensor([[place >= 0 for place in places]]),
        "image_places": torch.tensor([places]),
        "image_documents": torch.tensor([documents], dtype=torch.int32),
        **more,
    }


def test_patches_and_who_sees_whom_by_hand(tmp_path: Path) -> None:
    """An image of 4 x 6 patches and one of 2 x 2, in windows of 4: 4 x 4 and 4 x 2, and 2 x 2."""
    from vlmsizes import PACKED

    vlm = merged(PACKED["vlm"], {"encoder": {"patches": {"window": 4, "full_layers": [0]}}})
    config = config_of(tmp_path, Plugins(), **{**PACKED, "vlm": vlm})
    batch = images(32, (0, 0), (9, 0), (-1, -1), grids=torch.tensor([[[4, 6], [2, 2], [0, 0]]]))
    counts = PictureCounts(config)
    assert counts(batch) == {"patches": 28, "patch_pairs": 576 + 16, "window_pairs": 256 + 64 + 16}
    clip = images(32, (0, 0), grids=torch.tensor([[[3, 4, 6]]]))
    assert counts(clip) == {"patches": 72, "patch_pairs": 3 * 576, "window_pairs": 3 * 320}
    assert counts({"targets": batch["targets"]}) == dict.fromkeys(counts(clip), 0)


def test_tiles_that_are_there_by_hand(tmp_path: Path) -> None:
    """2 x 1 tiles of 4 patches and one for the whole each: 10 tokens, which 20 - 3 tokens look at."""
    from vlmsizes import TILED

    config = config_of(tmp_path, Plugins(), **TILED)
    each = shape_of(config).geometry.each  # type: ignore[union-attr]
    batch = images(20, (3, 0), (-1, -1), grids=torch.tensor([[[2, 1], [0, 0]]]))
    found = PictureCounts(config)(batch)
    ahead = 3 * 2 * each  # text before the only image sees all
    assert found == {
        "patches": 2 * each,
        "patch_pairs": 4 * each**2,
        "looked_at": 17 * 2 * each + ahead,
    }


def test_pairs_of_text_and_images_by_hand(tmp_path: Path) -> None:
    """Ten tokens of one document, then six of another, of which two are padding. Images of 4 tokens stand at
    2, 3 and 7 of the first and at 12 of the second."""
    slots = ((2, 0), (3, 0), (7, 0), (12, 1))
    documents = torch.tensor([[0] * 10 + [1] * 6], dtype=torch.int32)
    batch = images(16, *slots, documents=documents, valid=torch.arange(16)[None] < 14)
    cross = {"max_images": 4, "fusion": "cross_attention", "cross_attention": {"every": 2}}
    assert PictureCounts(config_of(tmp_path, Plugins(), vlm=cross))(batch) == {
        "looked_at": 4 * (8 + 7 + 3 + 2)
    }
    # the two at 2 and 3 are neighbours, which those behind 7 no longer look at
    for before, ahead in (("none", 0), ("all", 2 * 3 + 2 * 1)):
        gated = {"layers": [1], "marked": False, "before_images": before}
        vlm = {"max_images": 4, "fusion": "gated_cross_attention", "gated_cross_attention": gated}
        found = PictureCounts(config_of(tmp_path, Plugins(), vlm=vlm))(batch)
        assert found == {"looked_at": 4 * (5 + 4 + 3 + 2 + ahead)}


def work(tables: Any) -> tuple[list[float], list[float], list[float], float]:
    """Tokens, images and FLOPs of each update of a run, as its records have them, and FLOPs of a token."""
    plugins = Plugins()
    done = run_tiny(tiny_config(plugins=plugins, **tables), plugins)
    columns = ("train/tokens_per_sec", "train/step_time_sec", "train/mfu", "data/images")
    speed, seconds, share, seen = (done.metric(name) for name in columns)
    ranks = done.session.ranks.world_size
    tokens = [one * other for one, other in zip(speed, seconds, strict=True)]
    flops = [one * other * 1e12 * ranks for one, other in zip(share, seconds, strict=True)]
    return tokens, seen, flops, done.session.metrics.meter.flops_per_token or 0.0


def staged(folder: Path, **train: int) -> Any:
    """Four updates of 4 samples, with the encoder frozen in the first two."""
    stages = {"stages": [{"start_step": 3, "modules": []}]}
    return tables(
        write_samples(folder, mixed_records(16)),
        train={"max_steps": 4, **train},
        metrics={"peak_tflops": 1.0, "log_interval": 1},
        freeze=stages,
        vlm={"encoder": {"vit": TOWER}},
    )


def test_a_run_counts_what_it_sees_in_the_stage_that_it_is_in(tmp_path: Path) -> None:
    """Two images of every four samples and one, in turn: 40960 each for the tower, 2048 for a matrix of the
    connector; frozen the tower runs forward alone."""
    tokens, seen, flops, token = work(staged(tmp_path, batch_size=2))
    assert len(set(seen)) > 1, "updates differ in what they see"
    for update, (count, pictures, found) in enumerate(zip(tokens, seen, flops, strict=True)):
        each = 40960 + 2048 * (2 + 3) if update < 2 else 3 * (40960 + 2 * 2048)
        assert found == pytest.approx(count * token + pictures * each, rel=1e-9)


@pytest.mark.parametrize(
    ("frozen", "text", "visual"),
    [
        ([], 6, 6),
        (["decoder.layers.*.attn.image", "decoder.layers.*.mlp.image"], 6, 4),
        (
            [f"decoder.layers.*.{name}_proj" for name in ("attn.[qkvo]", "mlp.gate", "mlp.up", "mlp.down")],
            4,
            6,
        ),
        (["decoder.layers"], 4, 4),
    ],
)
def test_each_modality_of_mot_has_its_own_weights(
    tmp_path: Path, frozen: list[str], text: int, visual: int
) -> None:
    """Two blocks of width 16 with two of four key heads: 768 weights of attention and 1536 of an MLP."""
    more: Any = {"model": {"n_kv_heads": 1, "n_heads": 2}, "freeze": {"modules": ["encoder", *frozen]}}
    found = tables(write_samples(tmp_path, mixed_records(16)), **more, train={"max_steps": 2})
    found["vlm"]["fusion"] = "mot"
    found["metrics"] = {"peak_tflops": 1.0}
    plugins = Plugins()
    done = run_tiny(tiny_config(plugins=plugins, **found), plugins)
    told = flops_of(done.session)
    assert told is not None
    blocks = 2 * (16 * 16 * 3 + 3 * 16 * 32)
    head, scores = 6 * 16 * done.session.config[ModelConfig].vocab_size, 6 * 2 * 16 * 32
    assert told.token == text * blocks + head + scores
    assert told.counted.get("visual_tokens", 0.0) == (visual - text) * blocks


def test_ranks_count_what_all_of_them_see(tmp_path: Path, pool2: WorkerPool) -> None:
    tokens, seen, flops, _ = work(staged(tmp_path, batch_size=2))
    ranks = pool2.run(work, staged(tmp_path, batch_size=1))
    assert ranks[0][0] == pytest.approx(tokens)
    assert ranks[0][1] == pytest.approx(seen)
    assert ranks[0][2] == pytest.approx(flops)


def test_runs_say_what_they_saw(tmp_path: Path) -> None:
    """Four samples an update: images 1, 0, 2, 0, of four tokens each; of every four one has no label."""
    records = mixed_records(40)
    for record in records[1::4]:
        record["prompt"] = "x" * 40
    plugins = Plugins()
    tables: dict[str, Any] = {"train": {"batch_size": 40, "max_steps": 2}, "metrics": {"peak_tflops": 1.0}}
    done = run_tiny(config_of(write_samples(tmp_path, records), plugins, **tables), plugins)
    assert done.metric("data/images") == [30.0, 30.0]
    assert done.metric("data/samples_without_label") == pytest.approx([0.25, 0.25])
    rates = done.metric("train/visual_tokens_per_sec")
    seconds = done.metric("train/step_time_sec")
    assert rates[1] * seconds[1] == pytest.approx(120, rel=0.5)
    assert all(share > 0 for share in done.metric("train/mfu"))
