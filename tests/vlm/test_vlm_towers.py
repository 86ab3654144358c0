"""CLIP and SigLIP through transformers: features, pixels and weights are theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_vlm_model import batch_of, session_of
from vlmkit import mixed_records, write_samples

from forge_vlm.data.pixels import prepared
from forge_vlm.options import ClipOptions, SiglipOptions

pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 32,
}


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


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_without_a_checkpoint_it_trains_from_random_weights(folder: Path, name: str) -> None:
    with session_of(folder, vlm={"encoder": {"name": name, name: SIZES}}) as session:
        session.step_fn.train(session, 1)
        assert all(bool(p.isfinite().all()) for p in session.model.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["clip", "siglip"])
@pytest.mark.parametrize("shape", [(50, 31), (20, 47)])
def test_pixels_are_those_of_the_processor(name: str, shape: tuple[int, int]) -> None:
    import transformers

    random = np.random.default_rng(1)
    picture = Image.fromarray(random.integers(0, 256, (*shape, 3), dtype=np.uint8))
    options: Any = ClipOptions if name == "clip" else SiglipOptions
    geometry = options(**{**SIZES, "image_size": 16}).geometry()
    if name == "clip":
        module = transformers.models.clip.image_processing_pil_clip
        processor = module.CLIPImageProcessorPil(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        )
    else:
        module = transformers.models.siglip.image_processing_pil_siglip
        processor = module.SiglipImageProcessorPil(size={"height": 16, "width": 16}, resample=3)
    expected = processor(picture, return_tensors="pt")["pixel_values"][0]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (geometry.mean, geometry.std))
    found = (torch.from_numpy(prepared(picture, geometry)).float() / 255 - mean) / std
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
