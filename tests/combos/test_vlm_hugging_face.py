"""Families that see against transformers: logits both ways, on tiny random models and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from paritykit import SEEING, assert_close, exported, loaded, ours, randomise
from torch import Tensor
from vlmfamilies import (
    FAMILIES,
    IMAGE,
    LENGTH,
    SIZE,
    Sample,
    assert_pictures_matter,
    images_of,
    our_logits,
    sample_for,
    their_inputs,
    their_logits,
    theirs,
    tokenizer,
)
from vlmfolders import photograph

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.packages("ckpt", "vlm")
each_family = pytest.mark.parametrize("family", FAMILIES)


@each_family
def test_import_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    from forge_ckpt.hf.importing import import_hf
    from forge_ckpt.hf.opening import open_model

    model = theirs(family)
    model.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    given = sample_for(model.config)
    import_hf(tmp_path / "hf", tmp_path / "ours")
    for place in ("hf", "ours"):
        mine = ours(open_model(tmp_path / place))
        assert_close(our_logits(mine, given), their_logits(model, given))
    assert_pictures_matter(mine, given)


@each_family
def test_export_gives_transformers_the_logits_of_ours(family: str, tmp_path: Path) -> None:
    """Our model with other random weights, written and loaded by `from_pretrained`."""
    from forge_ckpt.hf.opening import open_model

    theirs(family).save_pretrained(tmp_path / "hf")
    opened = open_model(tmp_path / "hf")
    mine = ours(opened)
    randomise(mine, 3)
    name = FAMILIES[family][0]
    assert exported(opened, mine, tmp_path / "out", model_type=name) == name
    model = loaded(SEEING, tmp_path / "out")
    given = sample_for(model.config)
    assert_close(our_logits(mine, given), their_logits(model, given))


@pytest.mark.parametrize("family", ["llava", "paligemma", "idefics 3"])
def test_files_as_transformers_holds_them_in_memory(family: str, tmp_path: Path) -> None:
    from forge_ckpt.hf.opening import open_model

    model = theirs(family)
    model.save_pretrained(tmp_path / "hf", save_original_format=False)
    given = sample_for(model.config)
    assert_close(our_logits(ours(open_model(tmp_path / "hf")), given), their_logits(model, given))


PROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": SIZE},
        "crop_size": {"height": SIZE, "width": SIZE},
        "resample": 2,
        "image_mean": [0.4, 0.5, 0.6],
    },
    "llava, siglip and mistral": {
        "image_processor_type": "LlavaImageProcessor",
        "size": {"shortest_edge": SIZE},
        "crop_size": {"height": SIZE, "width": SIZE},
        "do_pad": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "paligemma": {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": SIZE, "width": SIZE},
        "image_std": [0.4, 0.5, 0.6],
    },
    "idefics 3": {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 40},
        "max_image_size": {"longest_edge": SIZE},
        "do_image_splitting": False,
    },
    "smolvlm, uneven grid": {
        "image_processor_type": "SmolVLMImageProcessor",
        "do_resize": False,
        "max_image_size": {"longest_edge": 18},
        "do_image_splitting": False,
        "resample": 3,
    },
}
"""What the image processor of a folder says."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "nested"), [("llava", False), *((name, True) for name in PROCESSORS)])
def test_pictures_are_prepared_as_the_folder_says(family: str, nested: bool, tmp_path: Path) -> None:
    """On the way in, and on the way out by the files that an export writes; release 5 of transformers nests
    what release 4 has in a file of its own."""
    from PIL import Image

    from forge_ckpt.hf.exporting import export_hf
    from forge_ckpt.hf.opening import open_model
    from forge_vlm.data.pixels import read_pixels
    from forge_vlm.geometry import geometry_of

    theirs(family).save_pretrained(tmp_path / "hf")
    prepared = PROCESSORS[family]
    file, content = "preprocessor_config.json", prepared
    if nested:
        file, content = "processor_config.json", {"image_processor": prepared}
    (tmp_path / "hf" / file).write_text(json.dumps(content), encoding="utf-8")
    picture = photograph(tmp_path / "picture.png")
    expected = pixels_of(tmp_path / "hf", Image.open(picture))
    opened = open_model(tmp_path / "hf")
    geometry: Any = geometry_of(opened.config)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (geometry.mean, geometry.std))
    found = (torch.from_numpy(read_pixels(picture, geometry)).float() / 255 - mean) / std
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    export_hf(opened, tmp_path / "out", model_type=FAMILIES[family][0])
    assert torch.equal(pixels_of(tmp_path / "out", Image.open(picture)), expected)


def pixels_of(folder: Path, picture: Any) -> Tensor:
    """(3, H, W) as the image processor of a folder makes them."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    values: Tensor = processor(picture, return_tensors="pt")["pixel_values"]
    return values.reshape(values.shape[-3:]).float()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llava", "paligemma", "idefics 3"])
def test_the_processor_of_an_export_makes_inputs_for_its_model(family: str, tmp_path: Path) -> None:
    """As many places as visual tokens, with the tokenizer and the files that an import copied."""
    from PIL import Image

    from forge_ckpt.hf.exporting import export_hf
    from forge_ckpt.hf.importing import import_hf
    from forge_ckpt.hf.opening import open_model

    theirs(family).save_pretrained(tmp_path / "hf")
    tokenizer().save_pretrained(tmp_path / "hf")
    kept = {"image_processor": {**PROCESSORS[family], "kept": 1}}
    (tmp_path / "hf/processor_config.json").write_text(json.dumps(kept), encoding="utf-8")
    import_hf(tmp_path / "hf", tmp_path / "ours")
    export_hf(open_model(tmp_path / "ours"), tmp_path / "out")
    assert json.loads((tmp_path / "out/processor_config.json").read_text())["image_processor"]["kept"] == 1
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "out")
    inputs = processor(
        text="w1 <image> w2", images=Image.open(photograph(tmp_path / "picture.png")), return_tensors="pt"
    )
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    inputs.pop("labels", None)
    with torch.no_grad():
        assert bool(model(**inputs).logits.isfinite().all())
    opened = open_model(tmp_path / "out")
    laid = laid_out("w1 <image> w2", opened.config, str(tmp_path / "out"))
    mine = [IMAGE if place >= 0 else token for token, place in zip(laid.tokens, laid.index, strict=True)]
    assert mine == inputs["input_ids"][0].tolist()


def laid_out(text: str, config: Any, folder: str) -> Any:
    """A prompt about one picture as ids, as data and prompts of ours have it."""
    from forge_core.data.tokenizer import load_tokenizer
    from forge_vlm.data.layout import lay_out, parts_of, pieces_of
    from forge_vlm.geometry import around_images, shape_of

    tokenizer = load_tokenizer(folder)
    pieces = pieces_of({"prompt": text, "answer": ""}, None)[:1]
    parts = parts_of(pieces, 1, tokenizer, "<image>", around_images(config))
    return lay_out(parts, places=shape_of(config).places, limit=LENGTH, eos_id=tokenizer.eos_id)


@pytest.mark.parametrize("family", ["llava", "paligemma 2", "idefics 3"])
def test_greedy_text_about_pictures_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    """Three prompts of several lengths in one batch here, one by one there; with caches in both."""
    from forge_ckpt.hf.opening import open_model
    from forge_vlm.generate import Prompts, generate

    model = theirs(family)
    model.save_pretrained(tmp_path / "hf")
    mine = ours(open_model(tmp_path / "hf"))
    given, lengths = sample_for(model.config), [LENGTH - 5, LENGTH - 20, 17]
    prompts = Prompts(
        tokens=torch.where(given.tokens == IMAGE, 0, given.tokens), lengths=lengths, images=images_of(given)
    )
    found = generate(mine, prompts, max_new_tokens=8, temperature=0)
    for row, length in enumerate(lengths):
        inputs = their_inputs(model.config, given, row, length)
        if "token_type_ids" in inputs:
            inputs["token_type_ids"] = torch.zeros_like(inputs["token_type_ids"])
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert found[row] == tokens[0, length:].tolist()


@pytest.mark.filterwarnings("ignore")
def test_pieces_of_a_large_picture_are_images_of_their_own(tmp_path: Path) -> None:
    """Idefics 3's processor cuts it, and the pieces and the whole stand between marks in the text."""
    from PIL import Image

    from forge_ckpt.hf.opening import open_model

    model = theirs("idefics 3")
    model.save_pretrained(tmp_path / "hf")
    tokenizer().save_pretrained(tmp_path / "hf")
    prepared = {**PROCESSORS["idefics 3"], "size": {"longest_edge": 24}, "do_image_splitting": True}
    content = {"processor_class": "Idefics3Processor", "image_processor": prepared, "image_seq_len": 4}
    (tmp_path / "hf/processor_config.json").write_text(json.dumps(content), encoding="utf-8")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "hf")
    inputs = processor(
        text="w1 <image> w2", images=Image.open(photograph(tmp_path / "picture.png")), return_tensors="pt"
    )
    values = inputs["pixel_values"]
    assert values.shape[1] == 5, "two rows and columns, and the whole"
    with torch.no_grad():
        expected = model(input_ids=inputs["input_ids"], pixel_values=values).logits
    pixels = ((values * 0.5 + 0.5) * 255).round().to(torch.uint8)
    given = Sample(
        tokens=inputs["input_ids"],
        prompt=torch.zeros_like(inputs["input_ids"], dtype=torch.bool),
        pixels=pixels,
        present=torch.ones(1, 5, dtype=torch.bool),
    )
    assert_close(our_logits(ours(open_model(tmp_path / "hf")), given), expected)
