"""Families that see against transformers: logits both ways, on tiny random models and pictures."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.packages("ckpt", "vlm")

IMAGE = 98
"""The id that stands for an image; text has ids below 90."""
SIZE, LENGTH, MOST = 12, 48, 2

TEXT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GEMMA = {**TEXT, "head_dim": 16}
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": 3,
}
CLIP = {**VISION, "model_type": "clip_vision_model"}
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("llava", {"vision_config": CLIP, "text_config": {**TEXT, "model_type": "llama"}}),
    "llava, siglip and mistral": (
        "llava",
        {
            "vision_config": SIGLIP,
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": 7},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "projector_hidden_act": "quick_gelu",
            "multimodal_projector_bias": False,
        },
    ),
    "llava, gelu and tied qwen": (
        "llava",
        {
            "vision_config": {**CLIP, "hidden_act": "gelu", "layer_norm_eps": 1e-4},
            "text_config": {**TEXT, "model_type": "qwen2", "tie_word_embeddings": True},
            "vision_feature_layer": 1,
            "projector_hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
    "paligemma": (
        "paligemma",
        {"vision_config": SIGLIP, "text_config": {**GEMMA, "model_type": "gemma"}, "projection_dim": 32},
    ),
    "paligemma 2": (
        "paligemma",
        {
            "vision_config": {**SIGLIP, "vision_use_head": False},
            "text_config": {
                **GEMMA,
                "model_type": "gemma2",
                "query_pre_attn_scalar": 24,
                "sliding_window": 5,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 3.0,
            },
            "projection_dim": 32,
        },
    ),
    "idefics 3": (
        "idefics3",
        {
            "vision_config": {**VISION, "model_type": "idefics3_vision"},
            "text_config": {**TEXT, "model_type": "llama"},
            "scale_factor": 2,
        },
    ),
    "smolvlm, uneven grid": (
        "smolvlm",
        {
            "vision_config": {**VISION, "image_size": 18, "model_type": "smolvlm_vision"},
            "text_config": {**TEXT, "model_type": "llama", "tie_word_embeddings": True},
            "scale_factor": 3,
            "tie_word_embeddings": True,
        },
    ),
}
"""`model_type` and what its configuration says."""

each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


def theirs(family: str) -> Any:
    """A model of transformers whose every parameter is random: norms and biases start as 1 and 0 there."""
    name, keys = FAMILIES[family]
    stands = "image_token_id" if name in ("idefics3", "smolvlm") else "image_token_index"
    config = transformers.AutoConfig.for_model(name, **{**keys, stands: IMAGE})
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    randomise(model, 7)
    return model


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(parameter + 0.2 * noise if parameter.ndim == 1 else 0.15 * noise)


def ours(opened: Any) -> Any:
    """A model with the weights of a folder."""
    from forge_ckpt.hf.start import fill
    from forge_core.loop.build import new_session
    from forge_core.loop.inference import build_for_inference, for_one_process

    with ExitStack() as stack:
        session = new_session(for_one_process(opened.config), opened.plugins, stack)
        build_for_inference(session)
    coverage = fill(session.model, opened.weights, opened.where, unknown=opened.unknown)
    assert not coverage.missing
    return session.model.eval()


@attrs.frozen(kw_only=True)
class Sample:
    """Three rows: two pictures, one, and none.

    Attributes:
        tokens: (3, S), `IMAGE` where visual tokens stand. prompt: (3, S) bool.
        pixels: (3, 2, 3, H, W) uint8. present: (3, 2) bool.
    """

    tokens: Tensor
    prompt: Tensor
    pixels: Tensor
    present: Tensor


def sample(tokens: int, size: int) -> Sample:
    """`tokens` visual tokens a picture."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 90, (3, LENGTH), generator=random)
    for row, start in ((0, 3), (0, 5 + tokens), (1, 1)):
        ids[row, start : start + tokens] = IMAGE
    ends = torch.tensor([[LENGTH - 6], [LENGTH - 13], [20]])
    return Sample(
        tokens=ids,
        prompt=torch.arange(LENGTH)[None] < ends,
        pixels=torch.randint(0, 256, (3, MOST, 3, size, size), dtype=torch.uint8, generator=random),
        present=torch.tensor([[True, True], [True, False], [False, False]]),
    )


def their_logits(model: Any, given: Sample) -> Tensor:
    """Of all rows, each by itself: not all families take rows without a picture beside others."""
    with torch.no_grad():
        found = [model(**their_inputs(model.config, given, row)).logits for row in range(len(given.tokens))]
    return torch.cat(found)


def their_inputs(config: Any, given: Sample, row: int, length: int = LENGTH) -> dict[str, Any]:
    """What a model of theirs takes for the first `length` tokens of a row."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in statistics_of(config))
    pictures = (given.pixels[row][given.present[row]].float() / 255 - mean) / std
    inputs: dict[str, Any] = {"input_ids": given.tokens[row : row + 1, :length]}
    if len(pictures):
        by_row = config.model_type in ("idefics3", "smolvlm")
        inputs["pixel_values"] = pictures[None] if by_row else pictures
    if config.model_type == "paligemma":
        inputs["token_type_ids"] = (~given.prompt[row : row + 1, :length]).long()
    return inputs


def statistics_of(config: Any) -> tuple[list[float], list[float]]:
    """Mean and standard deviation that the processor of the tower has."""
    if config.vision_config.model_type == "clip_vision_model":
        return [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    return [0.5] * 3, [0.5] * 3


def our_logits(model: Any, given: Sample) -> Tensor:
    """Of all rows together."""
    tokens = torch.where(given.tokens == IMAGE, 0, given.tokens)
    with torch.no_grad():
        logits: Tensor = model.logits(model(tokens, images=images_of(given)))
    return logits


def images_of(given: Sample) -> dict[str, Tensor]:
    """What a batch has of them."""
    visual = given.tokens == IMAGE
    return {
        "pixels": given.pixels,
        "present": given.present,
        "image_index": torch.where(visual, visual.long().cumsum(1) - 1, -1),
        "image_places": torch.zeros(3, MOST, dtype=torch.int64),
        "image_documents": torch.where(given.present, 0, -1).int(),
        "prompt": given.prompt,
    }


def sample_for(config: Any) -> Sample:
    """Fits the pictures of a configuration of theirs."""
    vision = config.vision_config
    grid = vision.image_size // vision.patch_size // getattr(config, "scale_factor", 1)
    return sample(grid**2, vision.image_size)


def assert_close(one: Tensor, other: Tensor) -> None:
    scale = float(other.abs().max())
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * max(scale, 1.0))
    assert scale > 0.5, "logits near zero would agree whatever the model"


def assert_pictures_matter(model: Any, given: Sample) -> None:
    """Logits behind a picture depend on it."""
    other = attrs.evolve(given, pixels=255 - given.pixels)
    difference = (our_logits(model, given) - our_logits(model, other)).abs()
    assert float(difference[:2, -1].max()) > 1e-3
    assert float(difference[2].max()) == 0.0


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
    from forge_ckpt.hf.exporting import export_hf
    from forge_ckpt.hf.opening import open_model
    from forge_ckpt.hf.start import tensors_of
    from forge_ckpt.hf.weights import InMemory

    theirs(family).save_pretrained(tmp_path / "hf")
    opened = open_model(tmp_path / "hf")
    mine = ours(opened)
    randomise(mine, 3)
    source = attrs.evolve(opened, weights=InMemory(tensors_of(mine)), tokenizer=None)
    name = FAMILIES[family][0]
    assert export_hf(source, tmp_path / "out", model_type=name).model_type == name
    loaded, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert type(loaded).__name__ == json.loads((tmp_path / "out/config.json").read_text())["architectures"][0]
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    given = sample_for(loaded.config)
    assert_close(our_logits(mine, given), their_logits(loaded.eval(), given))


@pytest.mark.parametrize("family", ["llava", "paligemma", "idefics 3"])
def test_files_as_transformers_holds_them_in_memory(family: str, tmp_path: Path) -> None:
    from forge_ckpt.hf.opening import open_model

    model = theirs(family)
    model.save_pretrained(tmp_path / "hf", save_original_format=False)
    given = sample_for(model.config)
    assert_close(our_logits(ours(open_model(tmp_path / "hf")), given), their_logits(model, given))


def tokenizer() -> Any:
    """Ninety words and a token that stands for an image, as `IMAGE`."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(90)} | {"<bos>": 90, "<eos>": 91, "<unk>": 92}
    found = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = ("<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<spare>", "<pad>", "<image>")
    found.add_special_tokens([AddedToken(name, special=True) for name in names])
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, **special)


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


def picture_file(folder: Path) -> Path:
    """A photograph."""
    from PIL import Image

    photographs = Path(str(pytest.importorskip("sklearn.datasets").__file__)).parent / "images"
    Image.open(photographs / "china.jpg").crop((50, 20, 350, 220)).save(folder / "picture.png")
    return folder / "picture.png"


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
    picture = picture_file(tmp_path)
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
    inputs = processor(text="w1 <image> w2", images=Image.open(picture_file(tmp_path)), return_tensors="pt")
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    inputs.pop("labels", None)
    with torch.no_grad():
        assert bool(model(**inputs).logits.isfinite().all())
    given = sample_for(model.config)
    assert int((inputs["input_ids"] == IMAGE).sum()) == int((given.tokens[1] == IMAGE).sum())


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
