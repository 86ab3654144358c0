"""What `forge check` says before anything is built or read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_core.commands.loading import load
from forge_core.commands.main import main
from forge_core.errors import ConfigError
from forge_core.plugins.catalog import load_object
from forge_vlm.components import COMPONENTS
from forge_vlm.problems import ASKING

SMALL = """
[vlm]
max_images = 2
[vlm.encoder.vit]
image_size = 8
patch_size = 4
dim = 16
n_layers = 1
n_heads = 2
[train]
seq_len = 128
[data]
"""


def refused(folder: Path, text: str, *flags: str, starting: bool = True) -> dict[str, str]:
    """Problems by path; none of a configuration that may start."""
    (folder / "run.toml").write_text(SMALL + text)
    try:
        load(str(folder / "run.toml"), flags, world_size=1, starting=starting)
    except ConfigError as error:
        return {problem.path: problem.message for problem in error.problems}
    return {}


def test_metrics_that_ask_are_those_that_say_so() -> None:
    metrics: dict[str, Any] = {
        each.name: load_object(each.target) for each in COMPONENTS if each.category == "vlm_metric"
    }
    assert {name for name, metric in metrics.items() if metric.asks} == ASKING


TAKEN = {"vlm/images": "data.jsonl", "vlm/webdataset": "a.tar", "vlm/webvid": "a.csv"}


def test_a_metric_that_asks_needs_answers(tmp_path: Path) -> None:
    asks = '--vlm.metrics=["caption_loss", "exact_match"]'
    assert refused(tmp_path, "", asks) == {
        "vlm.metrics": "exact_match asks the model, and vlm.answer_tokens = 0"
    }
    three = '--vlm.metrics=["exact_match", "vqa_accuracy", "relaxed_accuracy"]'
    assert refused(tmp_path, "", three)["vlm.metrics"].startswith(
        "exact_match, vqa_accuracy and relaxed_accuracy ask the model"
    )
    assert refused(tmp_path, "", asks, "--vlm.answer_tokens=4") == {}
    assert refused(tmp_path, "", '--vlm.metrics=["caption_loss"]') == {}


@pytest.mark.parametrize("source", ["vlm/images", "vlm/webdataset", "vlm/webvid"])
def test_data_that_is_not_there(tmp_path: Path, source: str) -> None:
    flags = ("--vlm.max_images=16",)
    missing = f"there is no file or folder {tmp_path}/none"
    one = f"source = '{source}'\npath = '{tmp_path}/none'\n"
    (tmp_path / TAKEN[source]).touch()
    assert refused(tmp_path, one, *flags) == {"data.path": missing}
    assert refused(tmp_path, one, *flags, starting=False) == {}
    assert refused(tmp_path, one.replace("none'", "'"), *flags) == {}
    mix = f"[[data.mix]]\nname = 'a'\n[[data.mix]]\nname = 'b'\n{one}[[eval.sets]]\nname = 'c'\n{one}"
    assert refused(tmp_path, mix, *flags) == {"data.mix.1.path": missing, "eval.sets.0.path": missing}


@pytest.mark.parametrize("source", TAKEN)
def test_a_folder_without_what_a_source_takes(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    taken, flag = TAKEN[source].replace("a.t", "*.t").replace("a.c", "*.c"), "--vlm.max_images=16"
    one = f"source = '{source}'\npath = '{tmp_path}'\n"
    missing = f"there is no {taken} in the folder {tmp_path}"
    assert refused(tmp_path, one, flag) == {"data.path": missing}
    assert refused(tmp_path, one, flag, starting=False) == {}
    assert refused(tmp_path, f"[[eval.sets]]\nname = 'c'\n{one}", flag) == {"eval.sets.0.path": missing}
    (tmp_path / TAKEN[source]).touch()
    assert refused(tmp_path, one, flag) == {}
    (tmp_path / "data.jsonl").unlink(missing_ok=True)
    (tmp_path / "train.jsonl").touch()
    assert main(["check", str(tmp_path / "run.toml"), flag]) == (2 if source == "vlm/images" else 0)
    if source == "vlm/images":
        told = capsys.readouterr().err
        assert missing in told
        assert f'name the file: data.path = "{tmp_path}/train.jsonl"' in told


def test_a_pattern_is_looked_for_where_it_begins(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    text = f"source = 'vlm/webdataset'\npath = '{tmp_path}/shards/%s'\n"
    for pattern in ("{000..012}.tar", "a-*.tar", "[ab].tar"):
        assert refused(tmp_path, text % pattern) == {}
        assert "data.path" in refused(tmp_path, (text % pattern).replace("shards", "shard"))


def test_more_frames_than_images(tmp_path: Path) -> None:
    key, message = "vlm.video.uniform.max_frames", "8 frames are more than vlm.max_images = 2"
    assert refused(tmp_path, "", f"--{key}=8") == {key: message}
    assert refused(tmp_path, "", f"--{key}=8", "--vlm.max_images=8") == {}
    for name in TAKEN.values():
        (tmp_path / name).touch()
    # the default is more than the images of a run without videos, and nobody asked for it
    assert refused(tmp_path, f"source = 'vlm/images'\npath = '{tmp_path}'\n") == {}
    videos = f"source = 'vlm/webvid'\npath = '{tmp_path}'\n"
    assert refused(tmp_path, videos) == {key: message.replace("8", "16")}
    assert refused(tmp_path, f"[[data.mix]]\nname = 'a'\n{videos}") == {key: message.replace("8", "16")}


def test_one_image_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(SMALL)
    assert main(["check", str(tmp_path / "run.toml"), "--vlm.max_images=1", "--train.seq_len=4"]) == 2
    assert "1 image of 4 tokens leaves no room for text in 4 tokens" in capsys.readouterr().err
