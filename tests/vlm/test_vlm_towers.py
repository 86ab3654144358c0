"""CLIP and SigLIP through transformers: features, pixels and weights are theirs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_vlm_model import batch_of, session_of
from vlmkit import TOWER, config_of, mixed_records, write_samples

from forge_core.config import ConfigError
from forge_core.errors import ForgeError
from forge_core.plugins import Plugins
from forge_vlm.data.pixels import read_pixels
from forge_vlm.options import ClipOptions, Idefics3Options, SiglipOptions

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples"), mixed_records())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_checkpoint_gives_its_own_features(folder: Path, tmp_path: Path, name: str) -> None:
    import transformers

    kind = {"clip": "CLIP", "siglip": "Siglip"}[name]
    sizes = {
        "image_size": 8,
        "patch_size": 4,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}VisionConfig")(**sizes)
    theirs = getattr(transformers, f"{kind}VisionModel")(config).eval()
    theirs.save_pretrained(tmp_path)
    encoder = {"name": name, name: {"path": str(tmp_path), "layer": -1}}
    with session_of(folder, vlm={"encoder": encoder}, train={"dtype": "fp32"}) as session:
        model: Any = session.model
        pixels = batch_of(session)["pixels"][0, :1].float() / 255
        with torch.no_grad():
            x = (pixels - model.pixel_mean) / model.pixel_std
            expected = theirs(pixel_values=x, output_hidden_states=True).hidden_states[-1]
            expected = expected[:, 1:] if name == "clip" else expected
            torch.testing.assert_close(model.encoder(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["clip", "siglip", "idefics3"])
def test_without_a_checkpoint_it_trains_from_random_weights(folder: Path, name: str) -> None:
    with session_of(folder, vlm={"encoder": {"name": name, name: TOWER}}) as session:
        model: Any = session.model
        before = [p.detach().clone() for p in model.connector.parameters()]
        session.step_fn.train(session, 1)
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        # pictures come out of it as different as they went in, and the connector learns from them
        pixels = batch_of(session)["pixels"][2].float() / 255
        with torch.no_grad():
            one, other = model.encoder(((pixels - model.pixel_mean) / model.pixel_std).to(before[0].dtype))
        assert float((one - other).abs().max()) > 1e-3
        assert all(not torch.equal(p, q) for p, q in zip(model.connector.parameters(), before, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_tower_comes_out_of_a_larger_model(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From a folder of SigLIP with its text tower, and one that lacks a weight is refused by name."""
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    both = transformers.SiglipConfig(text_config={**sizes, "vocab_size": 20}, vision_config=vision)
    theirs: Any = transformers.SiglipModel(both)
    theirs.eval().save_pretrained(tmp_path)
    encoder = {"name": "siglip", "siglip": {"path": str(tmp_path)}}
    caplog.set_level("WARNING", logger="forge")  # what a command shows while a model is built
    with session_of(folder, vlm={"encoder": encoder}, train={"dtype": "fp32"}) as session:
        model: Any = session.model
        pixels = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected = theirs.vision_model(pixel_values=pixels).last_hidden_state
            torch.testing.assert_close(model.encoder(pixels), expected, rtol=1e-6, atol=1e-6)
    count = len(list(model.encoder.parameters()))
    assert f"encoder: all {count} weights from {tmp_path}" in caplog.text
    weights = load_file(tmp_path / "model.safetensors")
    del weights["vision_model.post_layernorm.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        ForgeError, match=rf"lacks 1 of {count} weights, first post_layernorm\.bias"
    ) as caught:
        session_of(folder, vlm={"encoder": encoder}).__enter__()
    assert caught.value.exit_status == 2


def test_blocks_behind_the_states_that_are_taken_do_not_run(folder: Path) -> None:
    """Of two blocks -2 means the states after the first; an index beyond them is refused."""
    clip = {"name": "clip", "clip": {**TOWER, "layer": -2}}
    with session_of(folder, vlm={"encoder": clip}, train={"dtype": "fp32"}) as session:
        encoder: Any = session.model.encoder
        pixels = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        encoder.tower.encoder.layers[1].forward = None
        with torch.no_grad():
            states = encoder.tower.pre_layrnorm(encoder.tower.embeddings(pixels))
            expected = encoder.blocks[0](states, None)[:, 1:]
            assert torch.equal(encoder(pixels), expected)
    with pytest.raises(ConfigError, match=r"vlm\.encoder\.clip\.layer: there is none of this number among 2"):
        config_of(folder, Plugins(), "--vlm.encoder.clip.layer=-4", vlm={"encoder": clip})


PREPARED: dict[str, tuple[str, dict[str, Any], Any]] = {
    "clip": (
        "clip.image_processing_pil_clip.CLIPImageProcessorPil",
        {"size": {"shortest_edge": 42}, "crop_size": {"height": 42, "width": 42}},
        ClipOptions(image_size=42, patch_size=14),
    ),
    "llava, padded": (
        "llava.image_processing_pil_llava.LlavaImageProcessorPil",
        {"size": {"shortest_edge": 42}, "crop_size": {"height": 42, "width": 42}, "do_pad": True},
        ClipOptions(image_size=42, patch_size=14, fit="pad"),
    ),
    "siglip": (
        "siglip.image_processing_pil_siglip.SiglipImageProcessorPil",
        {"size": {"height": 42, "width": 42}},
        SiglipOptions(image_size=42, patch_size=14),
    ),
    "idefics 3": (
        "idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 70}, "max_image_size": {"longest_edge": 42}, "do_image_splitting": False},
        Idefics3Options(image_size=42, patch_size=14, longest_edge=70),
    ),
}
"""Image processor of transformers, its settings, and options of ours."""


def pictures() -> dict[str, Image.Image]:
    """Photographs that scikit-learn brings, in several shapes and modes, and noise."""
    folder = Path(str(pytest.importorskip("sklearn.datasets").__file__)).parent / "images"
    china = Image.open(folder / "china.jpg")
    noise = np.random.default_rng(1).integers(0, 256, (63, 42, 3), dtype=np.uint8)
    return {
        "wide": china,
        "high": china.rotate(90, expand=True),
        "square": Image.open(folder / "flower.jpg").crop((0, 0, 42, 42)),
        "gray": china.convert("L"),
        "transparent": china.crop((100, 50, 301, 171)).convert("RGBA"),
        "small noise": Image.fromarray(noise),
        "one pixel high": china.crop((0, 0, 60, 1)),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PREPARED)
def test_pixels_are_those_of_the_processor(name: str, tmp_path: Path) -> None:
    """All values of photographs as files, which the processor reads itself."""
    place, settings, options = PREPARED[name]
    module, _, kind = place.rpartition(".")
    processor = getattr(importlib.import_module(f"transformers.models.{module}"), kind)(**settings)
    geometry = options.geometry()
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (geometry.mean, geometry.std))
    for picture in pictures().values():
        picture.save(tmp_path / "picture.png")
        expected = processor(Image.open(tmp_path / "picture.png"), return_tensors="pt")["pixel_values"]
        read = torch.from_numpy(read_pixels(tmp_path / "picture.png", geometry))
        found = (read.float() / 255 - mean) / std
        expected = expected.float().reshape(found.shape)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
