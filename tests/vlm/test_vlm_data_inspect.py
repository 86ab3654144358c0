"""`forge data inspect` on samples with images: what they are, and where they stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from PIL import Image
from vlmdatakit import open_source, rows_of
from vlmkit import tables, write_samples

from forge_core.commands.main import main
from forge_core.data.inspection import decode_sample
from forge_core.data.tokenizer import ByteTokenizer
from forge_core.plugins import Plugins
from forge_core.testing import run_tiny, tiny_config
from forge_vlm.draw import Gallery, draw

RECORDS: list[dict[str, Any]] = [
    {"id": "both", "images": ["0.png", "1.png"], "prompt": "is <image> <image>?", "answer": "no"},
    {"id": "none", "prompt": "1+1=", "answer": "2"},
]


def written(folder: Path, **more: Any) -> str:
    """A configuration in a file."""
    found = tables(write_samples(folder, RECORDS), **more)
    found["model"] |= {"dim": 16, "n_layers": 2, "n_heads": 2, "ffn_hidden_dim": 32, "vocab_size": 257}
    found["train"] |= {"device": "cpu"}
    path = folder / "my.toml"
    path.write_text(tomli_w.dumps(found), encoding="utf-8")
    return str(path)


def test_images_are_shown_where_they_stand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", written(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "vlm/images" in out
    assert "2 sequences of 32 tokens" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    at = lines.index("sample 0")
    assert lines[at + 1 : at + 9] == [
        "document 0",
        "-- 3 is",
        "-- 4 [image 1 of 2 at 3: 0.png]",
        "-- 1",
        "-- 4 [image 2 of 2 at 8: 1.png]",
        "-- 1 ?",
        "learnt 3 no",
        "padding 16",
    ]


def test_as_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", written(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sources"][0]["shown"]
    texts = [[run["text"] for run in sample["runs"]] for sample in found]
    assert [sum("[image" in text for text in each) for each in texts] == [2, 0]


def test_images_that_take_no_place_are_shown_between_the_text(tmp_path: Path) -> None:
    write_samples(tmp_path, RECORDS)
    vlm = {"fusion": "cross_attention", "cross_attention": {"every": 2}}
    source = open_source(tmp_path, "vlm/images", vlm=vlm)
    runs = decode_sample(source[0], ByteTokenizer(), source.stretches_of(source[0], 0))
    assert [(run.tokens, run.text) for run in runs][:5] == [
        (3, "is "),
        (0, "[image 1 of 2 at 3: 0.png]"),
        (1, " "),
        (0, "[image 2 of 2 at 4: 1.png]"),
        (1, "?"),
    ]


def test_packed_samples_and_streams(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    write_samples(tmp_path, RECORDS)
    source = open_source(tmp_path, "vlm/images", data={"vlm/images": {"pack": True}})
    (row,) = rows_of(source)
    assert source.documents_of(0) == ["both", "none"]
    assert [each[:2] for each in source.stretches_of(row, 0)] == [(3, 4), (8, 4)]
    columns = {"image": [str(tmp_path / "0.png")], "answer": ["a"]}
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "saved"))
    stream = open_source(tmp_path / "saved", "vlm/hf", data={"vlm/hf": {"streaming": True}})
    (row,) = rows_of(stream)
    assert stream.stretches_of(row, 0) == [(0, 4, "[image 1 of 1 at 0]")]


def test_what_an_update_saw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_samples(tmp_path, RECORDS)
    plugins = Plugins()
    config = tiny_config(plugins=plugins, **tables(tmp_path))
    run = run_tiny(config, plugins, steps=1, folder=tmp_path / "runs")
    capsys.readouterr()
    assert main(["data", "inspect", str(run.folder), "--step", "1"]) == 0
    out = capsys.readouterr().out
    assert "documents both" in out
    assert "is [image 1 of 2 at 3: 0.png] [image 2 of 2 at 8: 1.png]?no" in out


def test_counts_lengths_and_room_of_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of "both" 3 + 4 + 1 + 4 + 1 + 3 = 16 tokens, of "none" 6, of "long" 4 + 40, cut to 32."""
    long = {"id": "long", "image": "2.png", "prompt": "x" * 39, "answer": "y"}
    path = written(tmp_path)
    write_samples(tmp_path, [*RECORDS, long])
    assert main(["data", "inspect", path, "--samples", "0", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["sources"]
    assert found["lengths"]["documents"] == 3
    assert found["lengths"]["mean"] == pytest.approx((16 + 6 + 32) / 3)
    assert found["padding"] == pytest.approx(1 - (16 + 6 + 32) / (3 * 32))
    assert found["counts"] == {
        "images": 3,
        "documents with images": 2,
        "cut": 1,
        "left out as too long": 0,
        "without a label": 1,
    }
    dropped = open_source(tmp_path, "vlm/images", data={"vlm/images": {"too_long": "drop"}}).contents()
    assert dropped.counts["left out as too long"] == 1
    assert dropped.lengths.tolist() == [16, 6]
    assert main(["data", "inspect", path, "--samples", "0"]) == 0
    out = capsys.readouterr().out
    assert "3 documents, images: 3, documents with images: 2, cut: 1" in out
    assert "3 sequences of 32 tokens, 43.75% left over" in out


def test_pictures_are_shown_once(tmp_path: Path) -> None:
    first, second = (np.full((3, 8, 4), shade, dtype=np.uint8) for shade in (40, 200))
    files = Gallery(tmp_path / "sample", drawn=False)
    assert [files.show(each) for each in (first, second, first)] == [
        f"[picture 1: 4 x 8 pixels, {tmp_path}/sample/1.png]",
        f"[picture 2: 4 x 8 pixels, {tmp_path}/sample/2.png]",
        "[picture 1]",
    ]
    with Image.open(tmp_path / "sample" / "2.png") as opened:
        assert np.array_equal(np.asarray(opened).transpose(2, 0, 1), second)
    drawn = Gallery(None, drawn=True)
    assert drawn.show(second) == f"[picture 1]\n{draw(second)}"
    assert drawn.show(second.copy()) == "[picture 1]"
    assert Gallery(None, drawn=False).show(first) == "[picture 1: 4 x 8 pixels]"


def test_a_run_keeps_the_pictures_of_its_last_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"image": f"{n // 2}.png", "prompt": f"{n}?", "answer": str(n % 2)} for n in range(12)]
    plugins = Plugins()
    found = tables(
        write_samples(tmp_path, records),
        data={"holdout": 0.4},
        eval={"sample": True, "sample_tokens": 2},
        metrics={"progress": "plain"},
    )
    run = run_tiny(tiny_config(plugins=plugins, **found), plugins, steps=1, folder=tmp_path / "runs")
    text = run.session.generator.sample(run.session)
    kept = sorted(path.name for path in (run.folder / "sample").iterdir())
    named = [line for line in text.splitlines() if line.startswith("[picture")]
    assert len(named) == text.count("the model answers") == 4
    assert len(set(named)) == len(named)
    assert kept == [f"{n}.png" for n in range(1, 1 + sum(".png" in line for line in named))]
    assert len(kept) in (2, 3)
