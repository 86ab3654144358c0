"""Videos that an encoder sees as one clip: frames, sizes and places, rows, masks, text, training."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_vlm_data_bad import filmed
from test_vlm_model import CLOSE, hidden_of, session_of
from test_vlm_video import cut, webvid
from torch import Tensor
from vlmdatakit import FRAMES, RATE, answers_of, open_source, rows_of, write_clip
from vlmkit import config_of, merged, write_samples
from vlmsizes import PATCHES

from forge_core.errors import ConfigError, DataError, ForgeError
from forge_core.plugins import Plugins
from forge_core.testing import run_tiny
from forge_vlm.data.frames import Clip, stretches, uniform
from forge_vlm.data.options import StretchesOptions, UniformOptions
from forge_vlm.data.order import in_order
from forge_vlm.data.patches import frames_of, patches_of, pictures_in
from forge_vlm.geometry import PackedGeometry, shape_of
from forge_vlm.geometry_packed import ClipRule

av = pytest.importorskip("av")
ENCODER: dict[str, Any] = {
    **PATCHES,
    "video_min_pixels": 64,
    "video_max_pixels": 256,
    "video_tokens": 18,
    "tokens_per_second": 2.0,
}
CLIPS: dict[str, Any] = {
    "vlm": {
        "max_images": 3,
        "max_patches": 96,
        "encoder": {"name": "patches", "frozen": False, "patches": ENCODER},
        "connector": {"name": "patch_merger"},
        "video": {"frames": "stretches", "stretches": {"fps": 1.0, "min_frames": 2, "max_frames": 6}},
    },
    "model": {"rope_sections": [2, 1, 1]},
    "train": {"seq_len": 48},
}
GEOMETRY = PackedGeometry(
    patch=4, side=2, dim=16, least=64, most=256, frames=2, clips=ClipRule(least=64, most=256)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip of four seconds and one of 1.3, an image and text, in turn, and a sample with all of them."""
    found = tmp_path_factory.mktemp("clips")
    records: list[dict[str, Any]] = []
    for number in range(12):
        record: dict[str, Any] = {"prompt": f"q{number} ", "answer": f"a{number}"}
        kinds: tuple[dict[str, Any], ...] = (
            {"video": "long.mp4", "prompt": "x<video>y"},
            {"video": "short.mp4"},
            {"image": "0.png"},
            {},
            {"images": ["0.png"], "videos": ["short.mp4", "long.mp4"], "prompt": "<video>x<image>y<video>?"},
        )
        records.append(record | kinds[number % 5])
    write_samples(found, records)
    write_clip(found / "long.mp4")
    write_clip(found / "short.mp4", 13)
    return found


def batch_of(session: Any, *numbers: int) -> dict[str, Tensor]:
    source = session.data.train.sources[0]
    rows = [source[number] for number in numbers]
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


@pytest.mark.parametrize(
    ("frames", "options", "numbers"),
    [
        (40, {"fps": 1.0}, [0, 10, 20, 30]),
        (40, {"fps": 0.5}, [0, 10, 20, 30]),  # at least four
        (40, {"fps": 1.4}, [0, 10, 20, 30]),  # 5.6, down to a multiple of two
        (40, {"fps": 9.0, "max_frames": 7}, [0, 6, 13, 20, 26, 33]),
        (7, {"fps": 2.0}, [0, 1, 3, 5]),
        (3, {"fps": 2.0}, [0, 1]),
        (1, {"fps": 2.0}, [0]),
        (40, {"fps": 1.0, "min_frames": 2, "multiple": 3}, [0, 13, 26]),
    ],
)
def test_frames_at_the_start_of_equal_stretches(
    frames: int, options: dict[str, Any], numbers: list[int]
) -> None:
    """As `Qwen2VLVideoProcessor.sample_frames` of transformers gives them, which needs torchvision."""
    found = stretches(StretchesOptions(**options))(Clip(seconds=frames / RATE, rate=RATE))
    assert found == pytest.approx([number / RATE for number in numbers])


@pytest.mark.parametrize("policy", [stretches(StretchesOptions(fps=9.0)), uniform(UniformOptions(fps=9.0))])
@pytest.mark.parametrize("seconds", [0.04, 0.16, 0.36, 0.96, 1.04, 2.16, 2.149])
def test_times_of_a_video_that_is_no_whole_number_of_frames_long(policy: Any, seconds: float) -> None:
    """0.36 s at 10 a second are 4 frames when rounded, of which the last would start behind 0.26 s."""
    clip = Clip(seconds=seconds, rate=RATE)
    times = [*policy(clip), clip.last + 1e-6]
    assert times[0] >= 0
    assert all(a < b for a, b in pairwise(times))


def test_patches_hold_their_frames_and_the_way_back() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (3, 3, 16, 8), dtype=np.uint8)
    patches = patches_of(frames, GEOMETRY)
    assert patches.shape == (2 * 8, 96)
    # the second square of the second step: its first patch, whose second frame is the last one again
    inside = patches[8 + 4].reshape(3, 2, 4, 4)
    assert np.array_equal(inside[:, 0], frames[2, :, 8:12, 0:4])
    assert np.array_equal(inside[:, 1], inside[:, 0])
    assert np.array_equal(patches[2].reshape(3, 2, 4, 4)[:, 1], frames[1, :, 4:8, 0:4])
    back = frames_of(patches, (2, 4, 2), GEOMETRY)
    assert np.array_equal(back, frames[[0, 1, 2, 2]])


def test_texts_say_the_order() -> None:
    def order(*texts: str) -> tuple[list[str], list[str]]:
        return in_order(texts, ["i", "j"], [["a", "b"], ["c"]], "<image>")

    found = order("<video>x<image>", "<image><video>")
    assert found == (["<image><image>x<image>", "<image><image>"], ["a", "b", "i", "j", "c"])
    assert order("none") == (["none"], ["i", "j", "a", "b", "c"])
    with pytest.raises(DataError, match="1 placeholder <video> for 0 videos"):
        in_order(["<video>"], ["i"], [], "<image>")
    with pytest.raises(DataError, match="1 placeholder <video> for 2 videos"):
        order("<video>")


def test_a_clip_takes_one_slot_and_its_tokens_stand_together(folder: Path) -> None:
    """Four frames in two steps of 2 x 2 squares; of 1.3 seconds two frames, in one step of the most pixels;
    a clip of two steps has a second apart in time for each frame."""
    with session_of(folder, **CLIPS) as session:
        batch = batch_of(session, 0, 1, 2, 3, 4)
        shape = shape_of(session.config)
        pictures = pictures_in({name: value[0].numpy() for name, value in batch.items()}, shape)
    assert batch["grids"].tolist() == [
        [[2, 4, 4], [0, 0, 0], [0, 0, 0]],
        [[1, 4, 4], [0, 0, 0], [0, 0, 0]],
        [[1, 2, 2], [0, 0, 0], [0, 0, 0]],
        [[0, 0, 0]] * 3,
        [[1, 4, 4], [1, 2, 2], [2, 4, 4]],
    ]
    assert batch["present"].sum(1).tolist() == [1, 1, 1, 0, 3]
    assert batch["steps"][0].tolist() == [4.0, 1.0, 1.0]  # two tokens a second, two frames of a second each
    assert batch["image_index"][0, :11].tolist() == [-1, *range(8), -1, -1]
    assert batch["image_places"][4].tolist() == [0, 5, 7]
    assert [float(each.mean()) for each in pictures] == pytest.approx([0, 60, 120, 180], abs=4)


def test_rows_equal_each_alone_packed_and_on_a_device_that_is_not_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session_of(folder, **CLIPS) as session:
        alone = []
        for number in range(5):
            batch = batch_of(session, number)
            alone.append(hidden_of(session, batch)[batch["valid"]])
        together = batch_of(session, *range(5))
        found = hidden_of(session, together)
        torch.testing.assert_close(found[together["valid"]], torch.cat(alone), **CLOSE)
        other = hidden_of(session, together, patches=255 - together["patches"])
        assert not torch.allclose(other[0][together["valid"][0]], alone[0])
        monkeypatch.setattr("forge_vlm.encoders.packed.on_host", lambda x: False)
        blind = hidden_of(session, together)
        torch.testing.assert_close(blind[together["valid"]], torch.cat(alone), **CLOSE)
    packing = merged(CLIPS, {"data": {"vlm/images": {"pack": True}}, "train": {"seq_len": 96}})
    with session_of(folder, **packing) as session:
        source: Any = session.data.train.sources[0]  # type: ignore[attr-defined]
        named = source.documents_of(0)
        assert len(named) > 1
        batch = batch_of(session, 0)
        found = hidden_of(session, batch)[batch["valid"]]
    expected = torch.cat([alone[int(name.removeprefix("line ")) - 1] for name in named])
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_clip_that_cannot_be_read_is_named_or_changes_nothing(tmp_path: Path) -> None:
    write_samples(tmp_path, [{"id": "clip", "video": "a.mp4", "prompt": "<video>", "answer": "b"}] * 2)
    cut(write_clip(tmp_path / "a.mp4"), 0.5)
    with pytest.raises(DataError, match=r"data\.jsonl:1: clip: cannot read the video a\.mp4"):
        open_source(tmp_path, "vlm/images", **CLIPS)
    masked = {"vlm/images": {"unreadable": "mask"}}
    (row, _) = rows_of(open_source(tmp_path, "vlm/images", data=masked, **CLIPS))
    assert int(row["unreadable"]) == 1
    assert not row["present"].any()
    assert not row["patches"].any()
    assert (row["image_index"] == -1).all()
    assert answers_of([row]) == [""]


def test_webvid_clips_and_the_same_video_twice(tmp_path: Path) -> None:
    rows = rows_of(open_source(webvid(tmp_path, 2), "vlm/webvid", **CLIPS))
    assert [row["grids"][0].tolist() for row in rows] == [[1, 4, 4], [1, 4, 4]]
    assert answers_of(rows) == ["clip 0, gray|", "clip 1, gray|"]
    write_clip(tmp_path / "a.mp4")
    write_samples(tmp_path, [{"videos": ["a.mp4", "a.mp4"], "prompt": "<video>,<video>", "answer": "b"}])
    (row,) = rows_of(open_source(tmp_path, "vlm/images", **CLIPS))
    assert row["grids"].tolist() == [[2, 4, 4], [2, 4, 4], [0, 0, 0]]
    assert np.array_equal(row["patches"][:32], row["patches"][32:64])
    # frames that are images of their own
    square: dict[str, Any] = {"vlm": {"max_images": 8, "video": {"uniform": {"max_frames": 4}}}}
    square["train"] = {"seq_len": 64}
    (row,) = rows_of(open_source(tmp_path, "vlm/images", **square))
    assert int(row["present"].sum()) == 8
    assert np.array_equal(row["pixels"][:4], row["pixels"][4:])


def test_a_video_is_asked_about_as_it_is_learnt(folder: Path) -> None:
    from forge_vlm.generator import VlmGenerator

    more = merged(CLIPS, {"model": {"max_seq_len": 80}})
    with session_of(folder, **more) as session:
        long = str(folder / "long.mp4")
        prompts = [
            {"prompt": "x<video>y", "video": long},
            {"prompt": "<image>x<video>y", "video": long, "images": [folder / "0.png"]},
        ]
        batch = VlmGenerator()._batch(session, prompts, 4)
        row = batch_of(session, 0)
        assert batch.images is not None
        assert torch.equal(batch.images["patches"][:1], row["patches"])
        assert torch.equal(batch.images["steps"][:1], row["steps"])
        assert batch.images["grids"][1, :2].tolist() == [[1, 2, 2], [2, 4, 4]]
        texts = VlmGenerator().generate(session, prompts, max_new_tokens=4, temperature=0.0)
        assert len(texts) == 2
        with pytest.raises(ForgeError, match=r"1 placeholder <image> for 2 images"):
            VlmGenerator().generate(session, [{**prompts[1], "prompt": "<video>"}], max_new_tokens=1)


def test_a_video_held_upright_is_asked_about_as_it_is_learnt(tmp_path: Path) -> None:
    """Stored as 32 x 64 pixels and turned by a quarter: 64 x 32, within 256 pixels 16 x 8."""
    from forge_vlm.generator import VlmGenerator

    filmed(tmp_path / "a.mp4", list(range(20)), turn=90)
    write_samples(tmp_path, [{"video": "a.mp4", "prompt": "<video>?", "answer": "b"}] * 2)
    with session_of(tmp_path, **CLIPS) as session:
        row = batch_of(session, 0)
        prompt = {"prompt": "<video>?", "video": str(tmp_path / "a.mp4")}
        asked = VlmGenerator()._batch(session, [prompt], 4).images
    assert row["grids"][0, 0].tolist() == [1, 4, 2]
    assert asked is not None
    assert torch.equal(asked["grids"], row["grids"])
    assert torch.equal(asked["patches"], row["patches"])


@pytest.mark.parametrize("behind", ["side", "time"])
def test_an_hour_takes_more_places_than_the_model_has_tokens(folder: Path, behind: str) -> None:
    """Generating with kept keys and values is as without them, whatever the time of a clip."""
    from forge_vlm.generate import generate, questions_of
    from forge_vlm.model import IMAGE_KEYS

    hour = {"encoder": {"patches": {"tokens_per_second": 900.0}}, "video": {"text_behind": behind}}
    with session_of(folder, **merged(CLIPS, {"vlm": hour, "model": {"max_seq_len": 48}})) as session:
        batch = batch_of(session, 0, 4)
        assert float(batch["steps"].max()) == 1800.0
        prompts, _ = questions_of(batch)
        found = generate(session.model, prompts, max_new_tokens=3, temperature=0.0)
        for row, new in enumerate(found):
            one = {name: value[row : row + 1].clone() for name, value in batch.items()}
            images = {name: one[name] for name in IMAGE_KEYS if name in one}
            end = prompts.lengths[row]
            for token in new:
                images["image_index"][:, end:] = -1
                with torch.no_grad():
                    hidden = session.model.eval()(one["tokens"][:, :end], images=_cut(images, end))
                    assert int(session.model.logits(hidden)[0, -1].argmax()) == token
                one["tokens"][:, end] = token
                end += 1


def _cut(images: dict[str, Tensor], end: int) -> dict[str, Tensor]:
    """Of the first `end` tokens."""
    return {n: v[:, :end] if n in ("image_index", "prompt") else v for n, v in images.items()}


def test_training_on_clips_moves_every_weight(folder: Path) -> None:
    plugins = Plugins()
    with session_of(folder, **CLIPS) as session:
        before = {name: p.detach().clone() for name, p in session.freeze.named.items()}
    done = run_tiny(config_of(folder, plugins, **CLIPS), plugins, steps=3)
    assert np.isfinite(done.losses).all()
    moved = {name for name, value in done.weights.items() if not torch.equal(value, before[name])}
    assert moved == set(before)


def test_limits_of_clips_are_checked(folder: Path) -> None:
    plugins = Plugins()

    def refused(match: str, **vlm: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            config_of(folder, plugins, **merged(CLIPS, {"vlm": vlm}))

    patches = {"video_min_pixels": 512}
    refused("512 is more than video_max_pixels = 256", encoder={"patches": patches})
    refused("4 is more than max_frames = 3", video={"stretches": {"min_frames": 4, "max_frames": 3}})
    few = merged(CLIPS, {"vlm": {"max_patches": 24}})
    message = r"data\.jsonl:1: has a video of 32 patches, more than vlm\.max_patches = 24"
    with pytest.raises(DataError, match=message), session_of(folder, **few):
        pass
    assert FRAMES == 40
