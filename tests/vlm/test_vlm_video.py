"""Frames of videos: which ones, that they are the right ones, and clips that cannot be decoded."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from test_vlm_layout import rows
from vlmkit import write_samples

from forge_core.errors import DataError
from forge_core.loss import IGNORE
from forge_vlm.data.video import Frame, frames_of, read_frame
from forge_vlm.geometry import ImageGeometry

av = pytest.importorskip("av")
FRAMES, RATE = 40, 10


def write_clip(path: Path) -> Path:
    """Frame n is gray of brightness 6 n, with a key frame every 12."""
    with av.open(str(path), "w") as clip:
        stream = clip.add_stream("mpeg4", rate=RATE)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        stream.gop_size = 12
        stream.time_base = Fraction(1, RATE)
        for number in range(FRAMES):
            picture = np.full((32, 32, 3), 6 * number, dtype=np.uint8)
            clip.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        clip.mux(stream.encode())
    return path


def test_frames_at_equal_distances_with_first_and_last(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "a.mp4")
    found = frames_of(clip, fps=1.0, least=2, most=16)
    assert [frame.time for frame in found] == pytest.approx([0.0, 1.3, 2.6, 3.9])
    assert len(frames_of(clip, fps=0.1, least=3, most=16)) == 3
    assert len(frames_of(clip, fps=9.0, least=1, most=6)) == 6


@pytest.mark.parametrize("number", [0, 7, 12, 25, 39])
def test_a_frame_is_the_one_of_its_time(tmp_path: Path, number: int) -> None:
    clip = write_clip(tmp_path / "a.mp4")
    pixels = read_frame(Frame(clip, number / RATE), ImageGeometry(size=8, grid=2, dim=16))
    assert abs(float(pixels.mean()) - 6 * number) < 3


def test_a_clip_becomes_images_of_its_sample(tmp_path: Path) -> None:
    write_samples(tmp_path, [{"video": "a.mp4", "prompt": "<video>? ", "answer": "b"}] * 2)
    write_clip(tmp_path / "a.mp4")
    more = {"vlm": {"max_images": 4}, "data": {"vlm/images": {"fps": 1.0, "min_frames": 3, "max_frames": 3}}}
    row = rows(tmp_path, **more)[0]
    assert row["present"].tolist() == [True, True, True, False]
    bright = [float(row["pixels"][slot].mean()) for slot in range(3)]
    assert bright == pytest.approx([0, 6 * 20, 6 * 39], abs=8)


def test_a_clip_that_cannot_be_decoded_is_named_or_masked(tmp_path: Path) -> None:
    write_samples(tmp_path, [{"id": "clip", "video": "a.mp4", "answer": "b"}] * 2)
    whole = write_clip(tmp_path / "a.mp4").read_bytes()
    (tmp_path / "a.mp4").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"data\.jsonl:1: cannot read the video .*a\.mp4"):
        rows(tmp_path)
    row = rows(tmp_path, data={"vlm/images": {"unreadable": "mask"}})[0]
    assert int(row["unreadable"]) == 1
    assert (row["targets"] == IGNORE).all()
