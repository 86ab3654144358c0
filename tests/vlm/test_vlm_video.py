"""Frames of videos: which ones, that they are the right ones, and clips that cannot be decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vlmdatakit import FRAMES, RATE, answers_of, brightness, open_source, rows_of, write_clip, write_tar
from vlmkit import merged, tables, write_samples

from forge_core.contract import Component
from forge_core.errors import ConfigError, DataError
from forge_core.plugins import Plugins
from forge_core.testing import isolated_plugins, plugin_object, run_tiny, tiny_config, tiny_session
from forge_vlm.data import clips
from forge_vlm.data.frames import Clip, uniform
from forge_vlm.data.options import UniformOptions
from forge_vlm.data.picture import Blob
from forge_vlm.data.video import look_at, read_frames
from forge_vlm.geometry import ImageGeometry

av = pytest.importorskip("av")
GEOMETRY = ImageGeometry(size=8, grid=2, dim=16)
FOUR: dict[str, Any] = {"vlm": {"max_images": 4, "video": {"uniform": {"max_frames": 4}}}}


def times(seconds: float, rate: float = RATE, **options: Any) -> list[float]:
    return list(uniform(UniformOptions(**options))(Clip(seconds=seconds, rate=rate)))


def test_frames_at_equal_distances_with_first_and_last() -> None:
    assert times(4.0, fps=1.0, min_frames=2) == pytest.approx([0.0, 1.3, 2.6, 3.9])
    assert len(times(4.0, fps=0.1, min_frames=3)) == 3
    assert len(times(4.0, fps=9.0, max_frames=6)) == 6
    assert times(0.2, fps=9.0, min_frames=8) == pytest.approx([0.0, 0.1])  # it has two frames
    assert times(0.0) == [0.0]


def test_a_video_says_how_long_it_is(tmp_path: Path) -> None:
    found = look_at(Blob(write_clip(tmp_path / "a.mp4"), "a.mp4"))
    assert (found.seconds, found.rate, found.frames) == (4.0, RATE, FRAMES)
    assert (found.height, found.width) == (32, 32)


@pytest.mark.parametrize("numbers", [[0], [7], [12], [25], [39], [0, 3, 11, 12, 13, 39], [11, 30, 31]])
def test_frames_are_those_of_their_times(tmp_path: Path, numbers: list[int]) -> None:
    clip = Blob(write_clip(tmp_path / "a.mp4"), "a.mp4")
    found = read_frames(clip, [number / RATE for number in numbers], GEOMETRY)
    assert [float(pixels.mean()) for pixels in found] == pytest.approx([6 * n for n in numbers], abs=3)


def test_far_frames_are_sought_and_near_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Key frames are 12 apart: of the frames 0 and 39 one decodes 0, and 36 to 39."""
    clip = Blob(write_clip(tmp_path / "a.mp4"), "a.mp4")
    decoded = []

    class Counting:
        def __init__(self, inner: Any) -> None:
            self.inner, self.streams = inner, inner.streams

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            self.inner.close()

        def seek(self, *args: Any, **kwargs: Any) -> None:
            self.inner.seek(*args, **kwargs)

        def decode(self, stream: Any) -> Any:
            for frame in self.inner.decode(stream):
                decoded.append(frame.time)
                yield frame

    opened = av.open
    monkeypatch.setattr(av, "open", lambda *args: Counting(opened(*args)))
    read_frames(clip, [0.0, 3.9], GEOMETRY)
    assert len(decoded) <= 6


def test_a_clip_becomes_images_of_its_sample(tmp_path: Path) -> None:
    write_samples(tmp_path, [{"video": "a.mp4", "prompt": "<video>? ", "answer": "b"}] * 2)
    write_clip(tmp_path / "a.mp4")
    three = {"fps": 1.0, "min_frames": 3, "max_frames": 3}
    more = {"vlm": {"max_images": 4, "video": {"uniform": three}}}
    row = rows_of(open_source(tmp_path, "vlm/images", **more))[0]
    assert row["present"].tolist() == [True, True, True, False]
    assert brightness(row) == pytest.approx([0, 6 * 20, 6 * 39], abs=8)
    assert row["image_places"].tolist() == [0, 4, 8, 0]


class Ends:
    """The first and the last frame, and nothing else."""

    def __init__(self, options: object) -> None:
        pass

    def __call__(self, clip: Clip) -> list[float]:
        return [0.0, clip.last]


class Backwards(Ends):
    def __call__(self, clip: Clip) -> list[float]:
        return [clip.last, 0.0]


def policies() -> Plugins:
    import forge_vlm.plugin

    parts = [
        Component(category="vlm_frames", name=name, target=f"test_vlm_video:{target}")
        for name, target in (("ends", "Ends"), ("backwards", "Backwards"))
    ]
    return isolated_plugins({"vlm": forge_vlm.plugin, "mine": plugin_object(forge_components=lambda: parts)})


def run_tables(folder: Path, frames: str = "uniform", **more: Any) -> dict[str, Any]:
    vlm: dict[str, Any] = {"max_images": 4, "video": {"frames": frames, "uniform": {"max_frames": 4}}}
    return tables(folder, **merged({"vlm": vlm}, more))


def test_a_policy_of_somebody_else(tmp_path: Path) -> None:
    write_samples(tmp_path, [{"video": "a.mp4", "answer": "b"}] * 4)
    write_clip(tmp_path / "a.mp4")
    plugins = policies()
    config = tiny_config(plugins=plugins, **run_tables(tmp_path, "mine/ends", mine={}))
    with tiny_session(config, plugins) as session:
        row = session.data.train.sources[0][0]  # type: ignore[attr-defined]
        assert brightness(row) == pytest.approx([0, 6 * 39], abs=8)
    plugins = policies()
    config = tiny_config(plugins=plugins, **run_tables(tmp_path, "mine/backwards", mine={}))
    with (
        pytest.raises(DataError, match=r"the policy mine/backwards .* picks \[3\.9, 0\.0\]"),
        tiny_session(config, plugins),
    ):
        pass
    six = run_tables(tmp_path, vlm={"video": {"uniform": {"min_frames": 6, "max_frames": 5}}})
    with pytest.raises(ConfigError, match="6 is more than max_frames = 5"):
        tiny_config(plugins=Plugins(), **six)


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def test_a_clip_that_cannot_be_decoded_is_named_or_masked(tmp_path: Path) -> None:
    write_samples(tmp_path, [{"id": "clip", "video": "a.mp4", "answer": "b"}] * 2)
    cut(write_clip(tmp_path / "a.mp4"), 0.5)
    with pytest.raises(DataError, match=r"data\.jsonl:1: clip: cannot read the video a\.mp4"):
        open_source(tmp_path, "vlm/images", **FOUR)
    masked = {"vlm/images": {"unreadable": "mask"}}
    row = rows_of(open_source(tmp_path, "vlm/images", data=masked, **FOUR))[0]
    assert int(row["unreadable"]) == 1
    assert not row["present"].any()
    assert answers_of([row]) == [""]


def test_a_clip_that_ends_early_is_named_or_masked(tmp_path: Path) -> None:
    """Matroska keeps its length at the start: that it is cut short shows only where it is decoded."""
    write_samples(tmp_path, [{"id": "clip", "video": "a.mkv", "answer": "b"}] * 2)
    cut(write_clip(tmp_path / "a.mkv"), 0.6)
    with pytest.raises(
        DataError, match=r"clip: the video a\.mkv ends before|clip: cannot read the video a\.mkv"
    ):
        rows_of(open_source(tmp_path, "vlm/images", **FOUR))
    masked = {"vlm/images": {"unreadable": "mask"}}
    row = rows_of(open_source(tmp_path, "vlm/images", data=masked, **FOUR))[0]
    assert int(row["unreadable"]) == 1


@pytest.mark.parametrize("fusion", ["joint", "cross_attention", "mot"])
def test_batches_with_nothing_valid_are_finite(tmp_path: Path, fusion: str) -> None:
    """Every third clip is broken: the micro-batches of one row with nothing but such a clip train nothing."""
    records = [{"video": f"{'bad' if n % 3 == 0 else 'good'}.mp4", "answer": f"b{n}"} for n in range(12)]
    write_samples(tmp_path, records)
    write_clip(tmp_path / "good.mp4")
    cut(write_clip(tmp_path / "bad.mp4"), 0.5)
    more = {
        "data": {"vlm/images": {"unreadable": "mask"}},
        "vlm": {"fusion": fusion},
        "train": {"batch_size": 1},
    }
    more["vlm"]["encoder"] = {"frozen": False}
    if fusion == "cross_attention":
        more["vlm"]["cross_attention"] = {"every": 2}
    plugins = Plugins()
    done = run_tiny(tiny_config(plugins=plugins, **run_tables(tmp_path, **more)), plugins, steps=12)
    assert done.oks.count(False) == 4  # nothing to learn from, nothing updated
    assert np.isfinite(done.losses).all()
    assert np.isfinite(done.grad_norms).all()
    assert all(bool(torch.isfinite(weight).all()) for weight in done.weights.values())
    assert sum(done.metric("data/unreadable_images")) == 4


def webvid(folder: Path, count: int = 6, **more: str) -> Path:
    """`count` clips of as many tenths of a second as their number, and 20 more."""
    lines = ["videoid,contentUrl,page_dir,name"]
    for number in range(count):
        page = f"{number // 2:06}_{number // 2:06}"
        lines.append(f'{100 + number},https://example.org/{number},{page},"clip {number}, gray"')
        write_clip(folder / "videos" / page / f"{100 + number}.mp4", 20 + number)
    (folder / "results.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_webvid(tmp_path: Path) -> None:
    source = open_source(webvid(tmp_path), "vlm/webvid", data={"vlm/webvid": {"question": "What? "}}, **FOUR)
    rows = rows_of(source)
    assert answers_of(rows) == [f"clip {number}, g|" for number in range(6)]
    assert source.documents_of(2) == ["102"]
    assert brightness(rows[5]) == pytest.approx([0, 48, 96, 144], abs=8)


def test_webvid_counts_and_masks_what_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    webvid(tmp_path)
    (tmp_path / "videos/000000_000000/101.mp4").unlink()
    cut(tmp_path / "videos/000001_000001/103.mp4", 0.4)
    with pytest.raises(DataError, match=r"101: there is no video .*101\.mp4"):
        open_source(tmp_path, "vlm/webvid", **FOUR)
    masked = {"vlm/webvid": {"unreadable": "mask"}}
    rows = rows_of(open_source(tmp_path, "vlm/webvid", data=masked, **FOUR))
    assert [int(row["unreadable"]) for row in rows] == [0, 1, 0, 1, 0, 0]
    assert [bool(answer) for answer in answers_of(rows)] == [True, False, True, False, True, True]
    assert "101 is masked: there is no video" in caplog.text
    assert "103 is masked: cannot read the video" in caplog.text


def test_webvid_columns_that_are_not_there(tmp_path: Path) -> None:
    webvid(tmp_path, 1)
    with pytest.raises(DataError, match=r"results\.csv:2: there is no column 'text'; there is: videoid,"):
        open_source(tmp_path, "vlm/webvid", data={"vlm/webvid": {"caption": "text"}}, **FOUR)
    with pytest.raises(DataError, match=r"results\.csv:2: there is no column 'folder'"):
        open_source(tmp_path, "vlm/webvid", data={"vlm/webvid": {"videos": "{folder}/a.mp4"}}, **FOUR)
    with pytest.raises(DataError, match="there is no CSV file"):
        open_source(tmp_path / "videos", "vlm/webvid", **FOUR)


@pytest.mark.parametrize("source", ["vlm/webvid", "vlm/images", "vlm/webdataset"])
def test_lengths_of_many_videos_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(clips, "SMALL", 2)
    webvid(tmp_path, 3)
    videos = sorted(tmp_path.glob("videos/*/*.mp4"))
    cut(videos[2], 0.4)
    write_samples(tmp_path, [{"video": str(each.relative_to(tmp_path)), "answer": "a"} for each in videos])
    members = [m for each in videos for m in ((each.name, each.read_bytes()), (f"{each.stem}.txt", b"a"))]
    write_tar(tmp_path / "a.tar", members)
    data = {"cache_dir": str(tmp_path / "cache"), source: {"unreadable": "mask"}}
    first = open_source(tmp_path, source, data=data, **FOUR)
    monkeypatch.setattr(clips, "look_at", None)  # nobody looks again
    again = open_source(tmp_path, source, data=data, **FOUR)
    assert again.fingerprint == first.fingerprint
    (known,) = (tmp_path / "cache" / "clips").glob("*.json")
    known.write_text("{", encoding="utf-8")
    monkeypatch.undo()
    assert open_source(tmp_path, source, data=data, **FOUR).fingerprint == first.fingerprint
