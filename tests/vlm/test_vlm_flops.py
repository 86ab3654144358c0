"""FLOPs of seeing by numbers worked out by hand, and what runs say of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vlmkit import config_of, mixed_records, write_samples

from forge_core.plugins import Plugins
from forge_core.testing import run_tiny
from forge_vlm.flops import encoder_flops, flops_of_seeing
from forge_vlm.options import ClipOptions, SiglipOptions, VitOptions
from forge_vlm.options_tiled import TilesOptions

SIZES: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 32,
}


def test_a_vision_transformer_by_hand() -> None:
    """4 tokens: a patch is 48 x 16 weights; a block has 4 * 16 * 16 + 2 * 16 * 32 = 2048, and scores and
    sums of 4 x 4 x 16 each."""
    patches = 2 * 4 * 48 * 16
    block = 2 * 4 * 2048 + 2 * 2 * 4 * 4 * 16
    assert encoder_flops(VitOptions(**SIZES)) == patches + 2 * block == 40960
    assert encoder_flops(SiglipOptions(**SIZES)) == patches + 2 * block


def test_clip_by_hand() -> None:
    """Its class token is a fifth token, and the states before the last block are those that are taken."""
    assert encoder_flops(ClipOptions(**SIZES)) == 2 * 4 * 48 * 16 + (2 * 5 * 2048 + 4 * 5 * 5 * 16)
    assert encoder_flops(ClipOptions(**SIZES, layer=None)) == 2 * 4 * 48 * 16 + 2 * (
        2 * 5 * 2048 + 4 * 5 * 5 * 16
    )


def test_known_towers() -> None:
    """CLIP ViT-B/32 at 224 pixels takes 4.4 thousand million multiply-adds."""
    assert encoder_flops(ClipOptions(layer=None)) / 2 == pytest.approx(4.4e9, rel=0.01)
    assert encoder_flops(SiglipOptions()) / 2 == pytest.approx(17.5e9, rel=0.02)


def test_tiles_by_hand() -> None:
    """Two tiles of 4 patches and a token for the whole: 10 tokens see each other in 2 + 1 blocks."""
    tiled = TilesOptions(**SIZES, n_global_layers=1, max_tiles=2, taken=[0])
    assert encoder_flops(tiled) == 2 * 8 * 48 * 16 + 3 * (2 * 10 * 2048 + 4 * 10 * 10 * 16)


@pytest.mark.parametrize("name", ["vit", "clip", "siglip"])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_run_counts_its_tower(tmp_path: Path, name: str, frozen: bool) -> None:
    options = {**SIZES, **({"layer": -1} if name == "clip" else {})}
    vlm = {"max_images": 3, "encoder": {"name": name, "frozen": frozen, name: options}}
    config = config_of(tmp_path, Plugins(), vlm=vlm)
    kind = {"vit": VitOptions, "clip": ClipOptions, "siglip": SiglipOptions}[name]
    tower = encoder_flops(kind(**options)) * (1 if frozen else 3)
    # two matrices of 16 x 16 over 4 tokens; the first needs no gradient of what a frozen encoder gives
    connector = 2 * 4 * 16 * 16 * ((2 if frozen else 3) + 3)
    assert flops_of_seeing(config) == pytest.approx(3 * (tower + connector) / 32)


def test_blocks_of_cross_attention_count(tmp_path: Path) -> None:
    """One block of width 16: queries and outputs 512 weights, an MLP of 1536, 8 visual tokens to look at."""
    vlm = {"fusion": "cross_attention", "cross_attention": {"every": 2}}
    more = flops_of_seeing(config_of(tmp_path, Plugins(), vlm=vlm)) - flops_of_seeing(
        config_of(tmp_path, Plugins())
    )
    assert more == pytest.approx(6 * (512 + 1536) + 12 * 8 * 16 + 6 * 512 * 8 / 32)


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
