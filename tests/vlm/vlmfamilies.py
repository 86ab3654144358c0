"""Tiny models of transformers that see, with random weights and pictures, and what both sides say of them."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from paritykit import SEEING, SIZES, random_model
from torch import Tensor

transformers = pytest.importorskip("transformers")

IMAGE = 98
"""The id that stands for an image; text has ids below 90."""
SIZE, LENGTH, MOST = 12, 48, 2
VISIBLE = "vision_feature_select_strategy"

TEXT: dict[str, Any] = {**SIZES, "num_hidden_layers": 2}
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
    "llava, class token and two layers": (
        "llava",
        {
            "vision_config": CLIP,
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_feature_layer": [-1, 1],
            "vision_feature_select_strategy": "full",
        },
    ),
    "llava, siglip without its first patch, three layers": (
        "llava",
        {
            "vision_config": SIGLIP,
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_feature_layer": [0, -2, -1],
            "vision_feature_select_strategy": "default",
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


def theirs(family: str) -> Any:
    name, keys = FAMILIES[family]
    stands = "image_token_id" if name in ("idefics3", "smolvlm") else "image_token_index"
    return random_model(SEEING, name, **{**keys, stands: IMAGE})


@attrs.frozen(kw_only=True)
class Sample:
    """Rows of text and pictures.

    Attributes:
        tokens: (B, S), `IMAGE` where visual tokens stand. prompt: (B, S) bool.
        pixels: (B, M, 3, H, W) uint8. present: (B, M) bool.
    """

    tokens: Tensor
    prompt: Tensor
    pixels: Tensor
    present: Tensor


def sample(tokens: int, size: int) -> Sample:
    """Three rows: two pictures of `tokens` visual tokens each, one, and none."""
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
        "image_places": torch.zeros(given.present.shape, dtype=torch.int64),
        "image_documents": torch.where(given.present, 0, -1).int(),
        "prompt": given.prompt,
    }


def sample_for(config: Any) -> Sample:
    """Fits the pictures of a configuration of theirs."""
    vision = config.vision_config
    grid = vision.image_size // vision.patch_size // getattr(config, "scale_factor", 1)
    # of LLaVA all tokens, CLIP's class token among them, or all but the first
    clip, strategy = vision.model_type == "clip_vision_model", getattr(config, VISIBLE, "full")
    return sample(grid**2 + clip - (strategy == "default"), vision.image_size)


def assert_pictures_matter(model: Any, given: Sample) -> None:
    """Logits behind a picture depend on it."""
    other = attrs.evolve(given, pixels=255 - given.pixels)
    difference = (our_logits(model, given) - our_logits(model, other)).abs()
    assert float(difference[:2, -1].max()) > 1e-3
    assert float(difference[2].max()) == 0.0


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
