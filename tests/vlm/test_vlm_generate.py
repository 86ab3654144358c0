"""Generation from pictures and videos: what prompts hold, and that a cache changes nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_vlm_fusions import drawn, each_fusion
from test_vlm_model import hidden_of, session_of
from torch import Tensor
from vlmdatakit import write_clip
from vlmkit import SIZE, mixed_records, write_samples

from forge_core.config.tables import ModelConfig
from forge_core.errors import DataError, ForgeError, UsageError
from forge_core.loop.session import TrainingSession
from forge_core.model.generate import DecoderGenerator
from forge_vlm.generator import VlmGenerator

FRAMES = {"frames": "uniform", "uniform": {"fps": 2.0, "min_frames": 1, "max_frames": 3}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples"), mixed_records())


def without_a_cache(session: TrainingSession, row: dict[str, Tensor], length: int, count: int) -> list[int]:
    """What follows the first `length` tokens of a row, each from a forward over all before it."""
    model: Any = session.model
    found: list[int] = []
    one = {name: value[None].clone() for name, value in row.items()}
    one["image_index"][0, length:] = -1
    one["positions"] = torch.arange(one["tokens"].shape[1])[None]
    for step in range(count):
        one["tokens"][0, length : length + step] = torch.tensor(found, dtype=torch.int64)
        one["valid"] = (torch.arange(one["tokens"].shape[1]) < length + step)[None]
        one["documents"] = torch.where(one["valid"], 0, 1).int()
        hidden = hidden_of(session, one)
        found.append(int(model.logits(hidden[:, length + step - 1]).argmax()))
    return found


@pytest.mark.packages("moe", "vlm")
@each_fusion
def test_frames_and_pictures_generate_what_they_do_without_a_cache(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """A video of three frames beside two pictures and a text, in one batch of unequal prompts."""
    write_samples(tmp_path, [{"video": "a.avi", "prompt": "look <video>? ", "answer": "b"}] * 4)
    write_clip(tmp_path / "a.avi")
    more = {**more, "vlm": {**more["vlm"], "max_images": 3, "video": FRAMES}, "train": {"seq_len": 48}}
    with session_of(tmp_path, **more) as session:
        drawn(session)
        source: Any = session.data.train.sources[0]  # type: ignore[attr-defined]
        row = {name: torch.as_tensor(value) for name, value in source[0].items()}
        assert int(row["present"].sum()) == 3
        length = int((row["targets"] != -100).nonzero()[0]) + 1
        expected = without_a_cache(session, row, length, 5)
        prompts: list[Any] = [
            {"prompt": "look <video>? ", "video": str(tmp_path / "a.avi")},
            {"prompt": "a<image>b<image>", "images": [tmp_path / "0.png", tmp_path / "1.png"]},
            "text alone",
        ]
        texts = VlmGenerator().generate(session, prompts, max_new_tokens=5, temperature=0.0, eos_id=None)
        tokenizer = session.data.tokenizer
        assert texts[0] == tokenizer.decode(expected)
        for prompt, text in zip(prompts, texts, strict=True):
            (alone,) = VlmGenerator().generate(
                session, [prompt], max_new_tokens=5, temperature=0.0, eos_id=None
            )
            assert text == alone


def test_pictures_may_be_files_or_arrays(folder: Path) -> None:
    pixels = np.asarray(Image.open(folder / "2.png")).transpose(2, 0, 1)
    assert pixels.shape == (3, SIZE, SIZE)
    with session_of(folder) as session:
        drawn(session)
        prompts = [
            {"prompt": "q ", "images": [given]} for given in (pixels, folder / "2.png", folder / "3.png")
        ]
        texts = VlmGenerator().generate(session, prompts, max_new_tokens=8, temperature=0.0)
        assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ({"prompt": "a", "images": ["lost.png"]}, DataError, "there is no image lost.png"),
        ({"prompt": "<image>", "images": []}, DataError, "1 placeholder <image> for 0 images"),
        ({"prompt": "a", "images": ["0.png"] * 3}, ForgeError, r"has 3 images, vlm\.max_images = 2"),
        ({"prompt": "a", "sound": "a.wav"}, UsageError, "a prompt has sound"),
        ({"images": ["0.png"]}, UsageError, "a prompt has no text"),
        ({"prompt": "a", "images": ["0.png"], "video": "a.avi"}, DataError, r"there is no video a\.avi"),
        ({"prompt": "a" * 40}, ForgeError, "prompt 0 alone fills model.max_seq_len"),
    ],
)
def test_prompts_that_cannot_be_taken_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, prompt: Any, error: type[Exception], message: str
) -> None:
    monkeypatch.chdir(folder)
    with session_of(folder) as session, pytest.raises(error, match=message):
        VlmGenerator().generate(session, [prompt], max_new_tokens=2)


def test_nothing_is_asked_and_nothing_is_shown(folder: Path) -> None:
    """As of the text model: no prompt has no text, no token is an error; what is null is not there."""
    with session_of(folder) as session:
        generator = VlmGenerator()
        assert generator.generate(session, [], max_new_tokens=2) == []
        with pytest.raises(UsageError, match="max_new_tokens = 0 is not at least 1"):
            generator.generate(session, ["a"], max_new_tokens=0)
        prompts = [{"prompt": "a", "images": None, "video": None, "videos": None}, "a"]
        one, other = generator.generate(session, prompts, max_new_tokens=3, temperature=0.0)
        assert one == other


def test_a_prompt_that_leaves_too_little_room_says_how_much(folder: Path) -> None:
    prompt = {"prompt": "q ", "images": [folder / "0.png"]}
    with session_of(folder) as session:
        drawn(session)
        most = session.config[ModelConfig].max_seq_len
        assert most is not None
        with pytest.raises(ForgeError, match=rf"and {most} new ones exceed model\.max_seq_len") as caught:
            VlmGenerator().generate(session, [prompt], max_new_tokens=most)
        room = int(re.findall(r"at most (\d+) new", caught.value.hint)[0])
        VlmGenerator().generate(session, [prompt], max_new_tokens=room, temperature=0.0)
        with pytest.raises(ForgeError, match=f"{room + 1} new ones exceed"):
            VlmGenerator().generate(session, [prompt], max_new_tokens=room + 1)


def test_arrays_of_other_sizes_are_what_their_files_are(tmp_path: Path) -> None:
    """Pixels wider than tall, which the encoder's one size has to be made of."""
    write_samples(tmp_path, mixed_records(8))
    pixels = np.random.default_rng(0).integers(0, 256, (3, 12, 20), dtype=np.uint8)
    Image.fromarray(pixels.transpose(1, 2, 0)).save(tmp_path / "wide.png")
    with session_of(tmp_path) as session:
        drawn(session)
        prompts = [{"prompt": "q ", "images": [given]} for given in (pixels, tmp_path / "wide.png")]
        texts = VlmGenerator().generate(session, prompts, max_new_tokens=8, temperature=0.0)
        assert texts[0] == texts[1]
        for wrong in (pixels / 255.0, pixels[0], pixels.transpose(1, 2, 0)):
            with pytest.raises(UsageError, match="an image is an array of"):
                VlmGenerator().generate(session, [{"prompt": "q ", "images": [wrong]}], max_new_tokens=1)


def test_a_model_of_text_alone_refuses_pictures(folder: Path) -> None:
    with (
        session_of(folder) as session,
        pytest.raises(UsageError, match="has images, and this model takes text"),
    ):
        DecoderGenerator().generate(session, [{"prompt": "a", "images": ["0.png"]}], max_new_tokens=2)


def test_answers_may_be_longer_than_what_is_left_of_a_sequence(tmp_path: Path) -> None:
    """An evaluation asks all rows of all ranks for as many tokens, whatever their prompts leave."""
    records = [{"image": "0.png", "prompt": "x" * (n + 1), "answer": "y"} for n in range(20)]
    write_samples(tmp_path, records)
    with session_of(tmp_path, vlm={"answer_tokens": 12}) as session:
        drawn(session)
        from forge_vlm.evaluation.run import answers_to
        from forge_vlm.generate import questions_of

        source: Any = session.data.train.sources[0]  # type: ignore[attr-defined]
        rows = [{k: torch.as_tensor(v)[None] for k, v in source[n].items()} for n in (0, 19)]
        both = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        for batch in (rows[0], both):
            found = answers_to(session, questions_of(batch)[0])
            assert all(len(answer) <= 12 for answer in found)
            assert found[0] == answers_to(session, questions_of(rows[0])[0])[0]
