"""Qwen2-VL and Qwen2.5-VL against transformers: logits both ways and text, with pictures of several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import vlmfolders
from paritykit import SEEING, assert_close, exported, loaded, random_model, randomise, session_of
from torch import Tensor
from vlmfolders import Sample, logits_of, logits_of_theirs
from vlmqwen import FAMILIES, TEXT

pytest.importorskip("transformers")
pytestmark = pytest.mark.packages("ckpt", "vlm")

IMAGE_TOKEN, END = 98, 2
LENGTH = 64
PROCESSOR = {"min_pixels": 64, "max_pixels": 1024, "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
SIZES = ((20, 37), (40, 16), (9, 9))
"""Heights and widths of pictures; as the encoder sees them 16 x 40, 40 x 16 and 8 x 8 pixels."""
each_family = pytest.mark.parametrize("family", FAMILIES)


def theirs(family: str) -> Any:
    keys = {"text_config": TEXT, "vision_config": FAMILIES[family], "image_token_id": IMAGE_TOKEN}
    return random_model(SEEING, family, **keys, tie_word_embeddings=False)


def saved(model: Any, folder: Path, **options: Any) -> Path:
    return vlmfolders.saved(model, folder, PROCESSOR, **options)


def opened(folder: Path) -> Any:
    return vlmfolders.opened(folder, LENGTH)


def picture(number: int) -> Any:
    return vlmfolders.noise(*SIZES[number], seed=number)


SAMPLES: tuple[Sample, ...] = (
    ([5, 6, 7], 0, [8, 9, 10, 11], 1, [12, 13]),
    ([14], 2, [15], 1, [16, 17, 18, 19]),
    ([20, 21, 22, 23, 24],),
)


def batch_of(session: Any, *rows: Sequence[Sample]) -> dict[str, Tensor]:
    return vlmfolders.stacked(
        [vlmfolders.row_of(session, samples, picture, length=LENGTH, end=END) for samples in rows]
    )


def inputs_of(batch: dict[str, Tensor], session: Any) -> dict[str, Tensor]:
    """What transformers takes, without its processor."""
    model = session.model
    here = batch["image_index"] >= 0
    given = {
        "input_ids": torch.where(here, IMAGE_TOKEN, batch["tokens"]),
        "attention_mask": batch["valid"].long(),
    }
    grids = batch["grids"][batch["present"]]
    if len(grids):
        counts = batch["grids"].prod(-1).sum(-1).tolist()
        patches = torch.cat([row[:count] for row, count in zip(batch["patches"], counts, strict=True)])
        pixels = (patches.view(-1, 3, 32) / 255 - model.pixel_mean.view(3, 1)) / model.pixel_std.view(3, 1)
        given["pixel_values"] = pixels.flatten(1)
        given["image_grid_thw"] = grids
        given["mm_token_type_ids"] = here.int()
    return given


@each_family
def test_import_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    model = theirs(family)
    session = session_of(opened(saved(model, tmp_path / "hf", max_shard_size="40KB")))
    batch = batch_of(session, SAMPLES[:1], SAMPLES[1:2])
    valid = batch["valid"]
    assert batch["grids"].tolist() == [
        [[1, 4, 10], [1, 10, 4], [0, 0, 0]],
        [[1, 2, 2], [1, 10, 4], [0, 0, 0]],
    ]
    expected = logits_of_theirs(model, inputs_of(batch, session))
    assert_close(logits_of(session, batch)[valid], expected[valid])


@each_family
def test_text_alone_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    model = theirs(family)
    session = session_of(opened(saved(model, tmp_path / "hf", save_original_format=False)))
    batch = batch_of(session, SAMPLES[2:])
    valid = batch["valid"]
    expected = logits_of_theirs(model, inputs_of(batch, session))[valid]
    assert_close(logits_of(session, batch)[valid], expected)
    assert_close(logits_of(session, batch, text=True)[valid], expected)


@each_family
def test_export_gives_transformers_the_logits_of_ours(family: str, tmp_path: Path) -> None:
    """Our model with other random weights, written and loaded by `from_pretrained`."""
    found = opened(saved(theirs(family), tmp_path / "hf"))
    session = session_of(found)
    randomise(session.model, 3)
    assert exported(found, session.model, tmp_path / "out") == family
    batch = batch_of(session, SAMPLES[:1], SAMPLES[1:2])
    valid = batch["valid"]
    expected = logits_of_theirs(loaded(SEEING, tmp_path / "out"), inputs_of(batch, session))
    assert_close(logits_of(session, batch)[valid], expected[valid])
    assert opened(tmp_path / "out").config.tables == found.config.tables


@each_family
def test_packed_rows_and_batches_give_what_each_sample_gives_alone(family: str, tmp_path: Path) -> None:
    session = session_of(opened(saved(theirs(family), tmp_path / "hf")))
    session.model.double()
    alone = [batch_of(session, [sample]) for sample in SAMPLES]
    expected = [logits_of(session, batch)[batch["valid"]] for batch in alone]
    packed = batch_of(session, (SAMPLES[2], SAMPLES[1]), (SAMPLES[0],))
    found = logits_of(session, packed)[packed["valid"]]
    torch.testing.assert_close(found, torch.cat([expected[2], expected[1], expected[0]]), rtol=0, atol=1e-12)


@each_family
def test_greedy_text_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    from forge_vlm.generate import Prompts, generate
    from forge_vlm.model import IMAGE_KEYS

    model = theirs(family)
    session = session_of(opened(saved(model, tmp_path / "hf")))
    batch = batch_of(session, SAMPLES[:1], SAMPLES[1:2])
    images = {name: batch[name] for name in IMAGE_KEYS if name in batch}
    lengths = batch["valid"].sum(1).tolist()
    prompts = Prompts(tokens=batch["tokens"], lengths=lengths, images=images)
    found = generate(session.model, prompts, max_new_tokens=8, temperature=0.0)
    for sample, row in zip(SAMPLES, found, strict=False):
        one = batch_of(session, [sample])
        count = int(one["valid"].sum())
        inputs = inputs_of(one, session)
        cut = {n: v[:, :count] for n, v in inputs.items() if n in ("input_ids", "attention_mask")}
        cut["mm_token_type_ids"] = inputs["mm_token_type_ids"][:, :count]
        more = {name: value for name, value in inputs.items() if name not in cut}
        tokens = model.generate(**cut, **more, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert row == tokens[0, count:].tolist()


def test_pixels_are_those_of_their_processor(tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    session = session_of(opened(saved(theirs("qwen2_vl"), tmp_path / "hf")))
    size = {"shortest_edge": PROCESSOR["min_pixels"], "longest_edge": PROCESSOR["max_pixels"]}
    rest: dict[str, Any] = {name: value for name, value in PROCESSOR.items() if not name.endswith("pixels")}
    processor = Qwen2VLImageProcessorPil(**rest, size=size)
    given = processor([picture(number) for number in range(3)], return_tensors="pt")
    batch = batch_of(session, [(0, 1, 2, [5])])
    inputs = inputs_of(batch, session)
    assert torch.equal(given["image_grid_thw"], inputs["image_grid_thw"])
    torch.testing.assert_close(inputs["pixel_values"], given["pixel_values"], rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_an_imported_folder_trains_and_goes_back(tmp_path: Path) -> None:
    from vlmtrained import trained_and_back

    saved(theirs("qwen2_5_vl"), tmp_path / "hf")
    trained_and_back(tmp_path, "qwen2_5_vl")
