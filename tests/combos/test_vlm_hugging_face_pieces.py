"""Idefics 3 and SmolVLM on pictures in pieces against transformers: inputs, logits, text, and training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from paritykit import SEEING, assert_close, loaded, random_model
from torch import Tensor
from vlmfamilies import TEXT, VISION
from vlmfolders import logits_of, photograph, stacked

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.packages("ckpt", "vlm")

SIZE, LONGEST, EACH = 12, 36, 4
"""Pixels of a piece, and of the longer side of a picture; tokens of an image."""
SIDES = 3
MARKS = (
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, SIDES + 1) for column in range(1, SIDES + 1)),
)
VOCABULARY = 288
IMAGE = 256 + 1 + 3 + MARKS.index("<image>")
PREPARED = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": LONGEST},
    "max_image_size": {"longest_edge": SIZE},
    "do_image_splitting": True,
}
PHOTOGRAPHS = {"landscape": (300, 200), "portrait": (70, 250), "square": (90, 90), "strip": (400, 20)}
"""Widths and heights."""
PIECES = {"landscape": 7, "portrait": 4, "square": 10, "strip": 4}
"""2 rows of 3, 3 of 1, 3 of 3 and 1 of 3, and the whole."""


def tokenizer() -> Any:
    """Bytes, of which two line breaks join, and the tokens around pictures."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate(letters)} | {"ĊĊ": 256}
    found = Tokenizer(models.BPE(words, [("Ċ", "Ċ")]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(name, special=True) for name in ("<bos>", "<eos>", "<pad>", *MARKS)])
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, **special)


def saved(folder: Path, name: str = "idefics3", **prepared: Any) -> Any:
    """A folder with model, tokenizer and processor, as transformers writes them, and the model."""
    text = {**TEXT, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "model_type": "llama"}
    keys = {
        "vision_config": {**VISION, "image_size": SIZE, "model_type": f"{name}_vision"},
        "text_config": text,
        "scale_factor": 2,
        "image_token_id": IMAGE,
    }
    model = random_model(SEEING, name, **keys)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    content = {
        "processor_class": "Idefics3Processor",
        "image_processor": {**PREPARED, **prepared},
        "image_seq_len": EACH,
    }
    (folder / "processor_config.json").write_text(json.dumps(content), encoding="utf-8")
    return model


def inputs_of(folder: Path, text: str, *pictures: Path) -> dict[str, Tensor]:
    """By the processor of a folder. That of SmolVLM wants torchvision for videos: its parts for pictures are
    put into the class of Idefics 3, which does with them what its own does."""
    from PIL import Image

    if "smolvlm" in (folder / "config.json").read_text(encoding="utf-8"):
        auto = (transformers.AutoImageProcessor, transformers.AutoTokenizer)
        processor = transformers.Idefics3Processor(*(each.from_pretrained(folder) for each in auto), EACH)
    else:
        processor = transformers.AutoProcessor.from_pretrained(folder)
    found = processor(text=text, images=[Image.open(each) for each in pictures], return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask", "pixel_values")}


def write(folder: Path, records: list[dict[str, Any]]) -> Path:
    """`data.jsonl` with these records, beside all photographs."""
    folder.mkdir()
    for kind, sizes in PHOTOGRAPHS.items():
        photograph(folder / f"{kind}.png", *sizes)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "data.jsonl").write_text(lines, encoding="utf-8")
    return folder


@contextmanager
def seeing(model: Path, samples: Path, *more: str, length: int = 160) -> Iterator[Any]:
    """A session of ours with a folder's weights, on samples."""
    from forge_ckpt.hf.opening import open_model
    from forge_ckpt.hf.using import using

    data = ["source=vlm/images", f"path={samples}", f"tokenizer={model}", "holdout=0.0", "num_workers=0"]
    train = [f"seq_len={length}", "batch_size=1", "device=cpu"]
    flags = [*(f"--data.{each}" for each in data), *(f"--train.{each}" for each in train)]
    with using(open_model(model, [*flags, "--vlm.max_images=20", *more]), data=True) as session:
        yield session


def source_of(session: Any) -> Any:
    return session.data.train.sources[0]


def rows_of(session: Any, *numbers: int) -> dict[str, Tensor]:
    rows = [source_of(session)[number] for number in numbers]
    return stacked([{name: torch.as_tensor(value) for name, value in row.items()} for row in rows])


def as_theirs(batch: dict[str, Tensor], row: int = 0) -> tuple[list[int], Tensor]:
    """Ids with theirs where an image stands, and pixels of the images that are there."""
    valid = batch["valid"][row]
    ids = torch.where(batch["image_index"][row] >= 0, IMAGE, batch["tokens"][row])[valid]
    pixels = (batch["pixels"][row][batch["present"][row]].float() / 255 - 0.5) / 0.5
    return ids.tolist(), pixels


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", PHOTOGRAPHS)
def test_samples_are_what_the_processor_makes_of_them(kind: str, tmp_path: Path) -> None:
    """Ids, pixels, and then logits."""
    model = saved(tmp_path / "hf")
    record = {"image": f"{kind}.png", "prompt": "\nWhat <image>\n\nis it? ", "answer": "x"}
    samples = write(tmp_path / "samples", [record])
    inputs = inputs_of(tmp_path / "hf", record["prompt"], samples / f"{kind}.png")
    with seeing(tmp_path / "hf", samples) as session:
        batch = rows_of(session, 0)
        found = logits_of(session, batch)
    ids, pixels = as_theirs(batch)
    prompt = inputs["input_ids"][0].tolist()
    assert ids[: len(prompt)] == prompt
    assert len(ids) == len(prompt) + 2, "the answer, and its end"
    assert len(pixels) == PIECES[kind]
    torch.testing.assert_close(pixels, inputs["pixel_values"][0], rtol=0, atol=1e-6)
    with torch.no_grad():
        expected = model(input_ids=inputs["input_ids"], pixel_values=inputs["pixel_values"]).logits
    assert_close(found[:, : len(prompt)], expected)


@pytest.mark.filterwarnings("ignore")
def test_several_pictures_and_packed_samples(tmp_path: Path) -> None:
    """Two of unequal pieces in one prompt, beside others and text alone, packed and not."""
    saved(tmp_path / "hf")
    records: list[dict[str, Any]] = [
        {"images": ["strip.png", "portrait.png"], "prompt": "a<image>b<image>c", "answer": "d"},
        {"prompt": "e", "answer": "f"},
        {"image": "strip.png", "prompt": "g", "answer": "h"},
    ]
    samples = write(tmp_path / "samples", records)
    pair = [samples / "strip.png", samples / "portrait.png"]
    inputs = inputs_of(tmp_path / "hf", records[0]["prompt"], *pair)
    pack = '--data."vlm/images".pack=true'
    with seeing(tmp_path / "hf", samples, length=200) as one, seeing(tmp_path / "hf", samples, pack) as other:
        alone = [rows_of(one, number) for number in range(3)]
        expected = torch.cat([logits_of(one, batch)[batch["valid"]] for batch in alone])
        ids, pixels = as_theirs(alone[0])
        assert ids[:-2] == inputs["input_ids"][0].tolist()
        torch.testing.assert_close(pixels, inputs["pixel_values"][0], rtol=0, atol=1e-6)
        lengths = [int(batch["valid"].sum()) for batch in alone]
        source = source_of(other)
        assert [sum(lengths[i] for i in row) for row in source.rows] == [
            int(source[number]["valid"].sum()) for number in range(len(source))
        ]
        packed = rows_of(other, *range(len(source)))
        order = [number for row in source.rows for number in row]
        parts = expected.split(lengths)
        assert_close(logits_of(other, packed)[packed["valid"]], torch.cat([parts[i] for i in order]))


@pytest.mark.filterwarnings("ignore")
def test_a_picture_that_does_not_fit_goes_with_its_pieces_and_marks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "hf")
    record = {"images": ["strip.png", "landscape.png"], "prompt": "a<image>b<image>c", "answer": "d"}
    samples = write(tmp_path / "samples", [record, {"prompt": "e", "answer": "f"}])
    with seeing(tmp_path / "hf", samples, "--vlm.max_images=11", length=64) as session:
        batch = rows_of(session, 0)
        ids, pixels = as_theirs(batch)
        contents = source_of(session).contents()
    assert len(pixels) == PIECES["strip"]
    text = tokenizer().decode([token for token in ids if token != IMAGE])
    assert text.endswith("<fake_token_around_image>b")
    assert contents.counts["cut"] == 1
    assert contents.counts["images"] == PIECES["strip"]


def test_more_pieces_than_a_sequence_holds_are_refused_by_name(tmp_path: Path) -> None:
    from forge_core.errors import DataError

    saved(tmp_path / "hf")
    samples = write(tmp_path / "samples", [{"image": "landscape.png", "prompt": "a", "answer": "b"}])
    with (
        pytest.raises(DataError, match=r"7 images and pieces, more than vlm\.max_images = 6"),
        seeing(tmp_path / "hf", samples, "--vlm.max_images=6"),
    ):
        pass


@pytest.mark.filterwarnings("ignore")
def test_greedy_text_is_that_of_transformers(tmp_path: Path) -> None:
    """Of prompts with a large picture, as a path and as pixels, and with none, in one batch."""
    from PIL import Image

    model = saved(tmp_path / "hf")
    samples = write(tmp_path / "samples", [{"prompt": "a", "answer": "b"}])
    path = samples / "landscape.png"
    prompt = {"prompt": "What <image>? ", "images": [path]}
    pixels = np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1)
    with seeing(tmp_path / "hf", samples) as session:
        prompts = [prompt, {**prompt, "images": [pixels]}, "Who? "]
        found = session.generator.generate(session, prompts, max_new_tokens=8, temperature=0.0)
        end = session.data.tokenizer.eos_id
    text = {"input_ids": torch.tensor([tokenizer()("Who? ")["input_ids"]])}
    text["attention_mask"] = torch.ones_like(text["input_ids"])
    expected = []
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    for given in (inputs_of(tmp_path / "hf", str(prompt["prompt"]), path), text):
        with torch.no_grad():
            tokens = model.generate(**given, **options)
        new = tokens[0, given["input_ids"].shape[1] :].tolist()
        expected.append(tokenizer().decode([token for token in new if token != end]))
    assert found == [expected[0], expected[0], expected[1]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["idefics3", pytest.param("smolvlm", marks=pytest.mark.slow)])
def test_an_imported_folder_trains_is_evaluated_and_goes_back(name: str, tmp_path: Path) -> None:
    """Its export says that pictures are cut, and its processor makes of a picture what ours did."""
    from forge_ckpt.hf.exporting import export_hf
    from forge_ckpt.hf.importing import import_hf
    from forge_ckpt.hf.opening import open_model
    from forge_core.commands.loading import load
    from forge_core.plugins import Plugins
    from forge_core.testing import run_tiny

    saved(tmp_path / "hf", name)
    import_hf(tmp_path / "hf", tmp_path / "ours")
    names = list(PHOTOGRAPHS)
    records = [{"image": f"{names[n % 4]}.png", "prompt": f"q{n} ", "answer": f"a{n}"} for n in range(12)]
    samples = write(tmp_path / "samples", records)
    tables: dict[str, Any] = {
        "extends": "ours/model.toml",
        "model": {"init_from": str(tmp_path / "ours")},
        "data": {
            "source": "vlm/images",
            "path": str(samples),
            "tokenizer": str(tmp_path / "ours"),
            "holdout": 0.5,
        },
        "train": {"device": "cpu", "dtype": "fp32", "batch_size": 2, "max_steps": 2, "seq_len": 160},
        "vlm": {"answer_tokens": 2},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"mode": "sync"},
        "eval": {"steps": 1, "sample": True},
    }
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(tables), encoding="utf-8")
    plugins = Plugins()
    config, _ = load(str(tmp_path / "mine.toml"), (), plugins=plugins)
    vlm = config.get("vlm")
    assert (vlm.max_images, vlm.encoder.name) == (SIDES**2 + 1, "idefics3")
    done = run_tiny(config, plugins, folder=tmp_path / "runs")
    assert export_hf(open_model(done.folder), tmp_path / "out", model_type=name).model_type == name
    picture = samples / "landscape.png"
    one, other = (inputs_of(tmp_path / place, "w <image> v", picture) for place in ("hf", "out"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    record = {"image": "landscape.png", "prompt": "w <image> v", "answer": "x"}
    with seeing(tmp_path / "out", write(tmp_path / "others", [record])) as session:
        batch = rows_of(session, 0)
        found = logits_of(session, batch)
    with torch.no_grad():
        inputs = {"input_ids": other["input_ids"], "pixel_values": other["pixel_values"]}
        expected = loaded(SEEING, tmp_path / "out")(**inputs).logits
    assert_close(found[:, : expected.shape[1]], expected)
