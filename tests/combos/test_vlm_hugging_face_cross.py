"""Llama 3.2 Vision against transformers: logits both ways and text, with pictures in tiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import vlmfolders
from paritykit import SEEING, SIZES, assert_close, exported, loaded, random_model, randomise, session_of
from torch import Tensor
from vlmfolders import Sample, logits_of, logits_of_theirs

from forge_core.errors import ForgeError

pytest.importorskip("transformers")
pytestmark = pytest.mark.packages("ckpt", "vlm")

END = 2
IMAGE_TOKEN = SIZES["vocab_size"]
LENGTH = 40
TEXT: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "max_position_embeddings": 128,
    "cross_attention_layers": [1, 3],
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 50.0,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "pad_token_id": END,
    "bos_token_id": 1,
    "eos_token_id": END,
}
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_global_layers": 2,
    "attention_heads": 2,
    "intermediate_size": 40,
    "vision_output_dim": 72,
    "image_size": 12,
    "patch_size": 4,
    "max_num_tiles": 4,
    "intermediate_layers_indices": [0, 2],
}
PROCESSOR = {"size": {"height": 12, "width": 12}, "max_image_tiles": 4, "resample": 2}
SIZES = ((10, 11), (20, 26), (13, 60))
"""Heights and widths of pictures: one tile, 2 x 2 tiles, and 1 x 4."""


def theirs() -> Any:
    """Gates are random, too."""
    keys = {"text_config": TEXT, "vision_config": VISION, "image_token_index": IMAGE_TOKEN}
    return random_model(SEEING, "mllama", **keys)


def saved(model: Any, folder: Path, **options: Any) -> Path:
    return vlmfolders.saved(model, folder, PROCESSOR, **options)


def opened(folder: Path) -> Any:
    return vlmfolders.opened(folder, LENGTH)


def picture(number: int) -> Any:
    return vlmfolders.noise(*SIZES[number], seed=number)


SAMPLES: tuple[Sample, ...] = (
    (0, [5, 6, 7, 8], 1, [9, 10, 11]),
    (2, 1, [12, 13, 14], 0, [15, 16, 17, 18]),
)
ALONE: Sample = ([20, 21, 22, 23, 24],)
LATE: tuple[Sample, ...] = (
    ([3, 4, 5], 2, [6, 7, 8, 9]),
    ([30, 31], 0, 1, [12, 13], 2, [14, 15, 16]),
)
"""Text before the first image, of one and of several."""


def batch_of(session: Any, *rows: Sequence[Sample]) -> dict[str, Tensor]:
    return vlmfolders.stacked(
        [vlmfolders.row_of(session, samples, picture, length=LENGTH, end=END) for samples in rows]
    )


def inputs_of(batch: dict[str, Tensor], samples: Sequence[Sample] = SAMPLES) -> dict[str, Tensor]:
    """What transformers takes: pictures by its own processor, masks by its own functions."""
    from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
    from transformers.models.mllama.processing_mllama import (
        convert_sparse_cross_attention_mask_to_dense,
        get_cross_attention_token_mask,
    )

    sizes: dict[str, Any] = {"size": PROCESSOR["size"], "max_image_tiles": 4}
    processor = MllamaImageProcessorPil(**sizes, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    numbers = [
        [item for item in sample if isinstance(item, int)] for sample in samples[: len(batch["tokens"])]
    ]
    pictures: Any = [[picture(number) for number in row] for row in numbers]
    given = processor(pictures, return_tensors="pt")
    sparse = [get_cross_attention_token_mask(row.tolist(), IMAGE_TOKEN) for row in batch["tokens"]]
    dense = convert_sparse_cross_attention_mask_to_dense(
        sparse, num_tiles=given.pop("num_tiles"), max_num_tiles=4, length=batch["tokens"].shape[1]
    )
    return {
        "input_ids": batch["tokens"],
        "attention_mask": batch["valid"].long(),
        "cross_attention_mask": torch.from_numpy(dense),
        **given,
    }


def test_import_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    model = theirs()
    session = session_of(opened(saved(model, tmp_path / "hf", max_shard_size="40KB")))
    batch = batch_of(session, *([sample] for sample in SAMPLES))
    valid = batch["valid"]
    assert batch["grids"].tolist() == [[[1, 1], [2, 2], [0, 0]], [[1, 4], [2, 2], [1, 1]]]
    inputs = inputs_of(batch)
    pixels = (
        (batch["tiles"] / 255 - 0.5) / 0.5 * (batch["tiles"].flatten(3).amax(3) > 0)[..., None, None, None]
    )
    torch.testing.assert_close(pixels, inputs["pixel_values"], rtol=0, atol=1e-6)
    expected = logits_of_theirs(model, inputs)
    assert_close(logits_of(session, batch)[valid], expected[valid])
    changed = {**batch, "tiles": 255 - batch["tiles"]}
    assert not torch.allclose(logits_of(session, changed)[valid], expected[valid], atol=1e-2)


@pytest.mark.parametrize("sample", LATE, ids=["one image", "several"])
def test_text_before_the_first_image_gives_the_logits_of_transformers(tmp_path: Path, sample: Sample) -> None:
    """There it sees every image of its sample, tiles that are not there included; the MLP is left out."""
    model = theirs()
    session = session_of(opened(saved(model, tmp_path / "hf")))
    batch = batch_of(session, [sample])
    valid = batch["valid"]
    expected = logits_of_theirs(model, inputs_of(batch, [sample]))[valid]
    found = logits_of(session, batch)[valid]
    assert_close(found, expected)
    packed = batch_of(session, (ALONE, sample), (ALONE,))
    count = len(ALONE[0])  # type: ignore[arg-type]  # ids of text
    assert_close(logits_of(session, packed)[0, count : count + len(found)], expected)
    assert_close(logits_of(session, packed)[0, :count], logits_of(session, packed)[1, :count])
    changed = {**batch, "tiles": 255 - batch["tiles"]}
    first = len(sample[0]) - 1  # type: ignore[arg-type]  # ids of text
    assert not torch.allclose(logits_of(session, changed)[valid][first], expected[first], atol=1e-2)


def test_text_before_the_first_image_may_see_none(tmp_path: Path) -> None:
    """As in the text alone; a file has no word for it."""
    from forge_vlm.architectures import ARCHITECTURES

    saved(theirs(), tmp_path / "hf")
    blind = vlmfolders.opened(tmp_path / "hf", LENGTH, "--vlm.gated_cross_attention.before_images=none")
    session, first = session_of(blind), len(LATE[0][0])  # type: ignore[arg-type]  # ids of text
    batch = batch_of(session, [LATE[0]])
    text = logits_of(session, batch, text=True)[0]
    assert_close(logits_of(session, batch)[0, :first], text[:first])
    assert not torch.allclose(logits_of(session, batch)[0, first], text[first], atol=1e-2)
    with pytest.raises(ForgeError, match=r"no word for vlm\.gated_cross_attention\.before_images = none"):
        ARCHITECTURES["mllama"].write(blind.config)


def test_text_alone_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    model = theirs()
    session = session_of(opened(saved(model, tmp_path / "hf", save_original_format=False)))
    batch = batch_of(session, [ALONE])
    valid = batch["valid"]
    with torch.no_grad():
        expected = model(input_ids=batch["tokens"], use_cache=False).logits[valid]
    assert_close(logits_of(session, batch, text=True)[valid], expected)
    assert_close(logits_of(session, batch)[valid], expected)


def test_export_gives_transformers_the_logits_of_ours(tmp_path: Path) -> None:
    """Our model with other random weights, written and loaded by `from_pretrained`."""
    found = opened(saved(theirs(), tmp_path / "hf"))
    session = session_of(found)
    randomise(session.model, 3)
    assert exported(found, session.model, tmp_path / "out") == "mllama"
    batch = batch_of(session, *([sample] for sample in SAMPLES))
    valid = batch["valid"]
    expected = logits_of_theirs(loaded(SEEING, tmp_path / "out"), inputs_of(batch))
    assert_close(logits_of(session, batch)[valid], expected[valid])
    assert opened(tmp_path / "out").config.tables == found.config.tables


def test_packed_rows_and_batches_give_what_each_sample_gives_alone(tmp_path: Path) -> None:
    session = session_of(opened(saved(theirs(), tmp_path / "hf")))
    session.model.double()
    alone = [batch_of(session, (sample,)) for sample in (SAMPLES[0], LATE[0], ALONE)]
    expected = [logits_of(session, batch)[batch["valid"]] for batch in alone]
    packed = batch_of(session, (ALONE, LATE[0], SAMPLES[0]), (SAMPLES[0],), (ALONE,))
    found = logits_of(session, packed)[packed["valid"]]
    order = (2, 1, 0, 0, 2)
    torch.testing.assert_close(found, torch.cat([expected[i] for i in order]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sample", [SAMPLES[0], LATE[0]], ids=["image first", "text first"])
def test_greedy_text_is_that_of_transformers(tmp_path: Path, sample: Sample) -> None:
    from forge_vlm.generate import Prompts, generate
    from forge_vlm.model import IMAGE_KEYS

    model = theirs()
    session = session_of(opened(saved(model, tmp_path / "hf")))
    batch = batch_of(session, [sample])
    images = {name: batch[name] for name in IMAGE_KEYS if name in batch}
    count = int(batch["valid"].sum())
    prompts = Prompts(tokens=batch["tokens"], lengths=[count], images=images)
    [found] = generate(session.model, prompts, max_new_tokens=8, temperature=0.0)
    inputs = inputs_of(batch, [sample])
    cut = {n: inputs.pop(n)[:, :count] for n in ("input_ids", "attention_mask", "cross_attention_mask")}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        tokens = model.generate(**cut, **inputs, **options)
    assert found == tokens[0, count:].tolist()


@pytest.mark.filterwarnings("ignore")
def test_an_imported_folder_trains_and_goes_back(tmp_path: Path) -> None:
    from vlmtrained import trained_and_back

    saved(theirs(), tmp_path / "hf")
    trained_and_back(tmp_path, "mllama")
