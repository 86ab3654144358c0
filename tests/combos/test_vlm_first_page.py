"""The first page of docs/vlm.md: from a folder of images to a model that answers, as it is written there."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.packages("ckpt", "vlm")
PAGE = (Path(__file__).parents[2] / "docs" / "vlm.md").read_text(encoding="utf-8")
PART = PAGE.partition("## From a folder to a model that answers")[2].partition("\n## ")[0]
BLOCKS = [textwrap.dedent(block) for block in re.findall(r"(?:^(?:    .*)?\n)+", PART, re.MULTILINE)]
SMALL = ["--train.batch_size=2", "--train.dtype=fp32", "--train.device=cpu", "--eval.sample_tokens=8"]
STEPS = ["--train.max_steps=2", "--checkpoint.interval=2", "--eval.interval=2", "--checkpoint.mode=sync"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `photos`, whose lines are those of the page, on many images."""
    lines = next(block for block in BLOCKS if '"answer"' in block).strip().splitlines()
    folder = tmp_path / "photos"
    folder.mkdir()
    random = np.random.default_rng(0)
    with (folder / "data.jsonl").open("w", encoding="utf-8") as file:
        for number in range(40):
            record: dict[str, Any] = json.loads(lines[number % len(lines)])
            name = record["image"] if number < len(lines) else f"{number}.png"
            pixels = random.integers(0, 256, (20, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name)
            file.write(json.dumps({**record, "image": name}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str) -> None:
    (found,) = (block.strip() for block in BLOCKS if f"# {name}\n" in block)
    Path(name).write_text(found, encoding="utf-8")


def forge(capsys: pytest.CaptureFixture[str], line: str, *more: str) -> str:
    from forge_core.commands.main import main

    capsys.readouterr()
    status = main([*shlex.split(line)[1:], *more])
    out, err = capsys.readouterr()
    assert status == 0, f"{line}: {err}"
    return out


def test_a_model_of_ones_own(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("mine.toml")
    (lines,) = (block.strip().splitlines() for block in BLOCKS if "forge generate" in block)
    assert [line.split()[1] for line in lines] == ["check", "data", "train", "generate"]
    forge(capsys, lines[0])
    assert "documents with images: 35" in forge(capsys, lines[1])  # 5 are held out
    sizes = [
        "--model.dim=32",
        "--model.n_layers=1",
        "--vlm.encoder.vit.dim=16",
        "--vlm.encoder.vit.n_layers=1",
    ]
    forge(capsys, lines[2], *SMALL, *STEPS, *sizes)
    metrics = [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    assert any("eval/exact_match" in record for record in metrics)
    answer = forge(capsys, lines[3], "--max-new-tokens=4", "--json")
    assert json.loads(answer)["prompt"] == "What is this? "


@pytest.mark.slow  # transformers takes its time
@pytest.mark.filterwarnings("ignore")
def test_a_text_model_and_a_tower_of_others(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that moves is the connector."""
    transformers = pytest.importorskip("transformers")
    from vlmfamilies import tokenizer

    from forge_ckpt.hf.opening import open_model

    words = tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = transformers.LlamaConfig(vocab_size=len(words), **sizes)
    transformers.LlamaForCausalLM(text).save_pretrained("SmolLM2-135M")
    words.save_pretrained("SmolLM2-135M")
    vision = transformers.SiglipVisionConfig(image_size=32, patch_size=16, **sizes)
    transformers.SiglipVisionModel(vision).save_pretrained("siglip-base-patch16-224")
    write("tuned.toml")
    (line,) = (line for block in BLOCKS for line in block.splitlines() if line.startswith("forge import"))
    forge(capsys, line)
    forge(capsys, "forge check tuned.toml")
    forge(capsys, "forge train tuned.toml", *SMALL, *STEPS, "--train.seq_len=64")
    start, end = open_model(Path("text")), open_model(Path("runs/tuned"))
    for name in start.weights.names():
        assert (end.weights.read(f"decoder.{name}") == start.weights.read(name)).all(), name
