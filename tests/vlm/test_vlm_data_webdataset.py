"""Tar shards: samples by offset, an index that is remembered, and shards that are not right."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vlmdatakit import answers_of, brightness, digits, encoded, open_source, rows_of, write_clip, write_tar

from forge_core.errors import DataError
from forge_vlm.data import tar as tar_module
from forge_vlm.data.picture import Blob
from forge_vlm.data.webdataset import ranges, shards_of

Member = tuple[str, bytes]


def member(key: str, picture: int, answer: str, kind: str = "txt") -> list[Member]:
    """An image and its text."""
    pictures, _ = digits()
    text = answer.encode() if kind == "txt" else json.dumps({"prompt": "? ", "answer": answer}).encode()
    return [(f"{key}.png", encoded(pictures[picture])), (f"{key}.{kind}", text)]


def shard(path: Path, first: int = 0, count: int = 4) -> Path:
    members = [m for n in range(first, first + count) for m in member(f"{n:04}", n, f"n{n}")]
    return write_tar(path, members)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(path: Path | str, **options: Any) -> Any:
    return open_source(path, "vlm/webdataset", data={"vlm/webdataset": options})


def test_shards_are_read_by_number(tmp_path: Path) -> None:
    for number in range(3):
        shard(tmp_path / f"s{number}.tar", 4 * number)
    source = opened(tmp_path)
    assert source.documents_of(5) == ["s1.tar/0005"]
    for number in (11, 0, 7):
        row = source[number]
        assert answers_of([row]) == [f"n{number}|"]
        expected = np.asarray(digits()[0][number]).transpose(2, 0, 1)
        assert np.array_equal(row["pixels"][0], expected)
    assert answers_of(rows_of(opened(tmp_path / "s1.tar"))) == ["n4|", "n5|", "n6|", "n7|"]


def test_patterns(tmp_path: Path) -> None:
    for number in range(12):
        shard(tmp_path / f"s{number:03}.tar", number, 1)
    assert list(ranges("a{08..11}b{0..1}"))[1:4] == ["a08b1", "a09b0", "a09b1"]
    found = shards_of(tmp_path / "s{008..011}.tar", "x")
    assert [path.name for path in found] == ["s008.tar", "s009.tar", "s010.tar", "s011.tar"]
    assert len(shards_of(tmp_path / "s00*.tar", "x")) == 10
    with pytest.raises(DataError, match="there are only 2"):
        shards_of(tmp_path / "s{010..013}.tar", "x")
    with pytest.raises(DataError, match="there is no tar"):
        shards_of(tmp_path / "t*.tar", "x")


def test_several_images_json_folders_and_other_members(tmp_path: Path) -> None:
    pictures, _ = digits()
    turns = [{"from": "human", "value": "<image> or <image>?"}, {"from": "gpt", "value": "so"}]
    members = [
        ("a/", b""),
        ("a/1.left.png", encoded(pictures[1])),
        ("a/1.right.PNG", encoded(pictures[2])),
        ("a/1.json", json.dumps({"conversations": turns}).encode()),
        ("a/1.cls", b"3"),
        ("a/.hidden.txt", b"x"),
        ("readme", b"x"),
        ("b.json", json.dumps({"width": 8}).encode()),
        ("b.txt", b"cap"),
        ("b.webp", encoded(pictures[3], "WEBP")),
    ]
    rows = rows_of(opened(write_tar(tmp_path / "s.tar", members)))
    assert answers_of(rows) == ["so|", "cap|"]
    assert rows[0]["image_places"].tolist() == [0, 4 + len(" or ")]
    for slot in (0, 1):
        expected = np.asarray(pictures[slot + 1]).transpose(2, 0, 1)
        assert np.array_equal(rows[0]["pixels"][slot], expected)


def test_a_key_of_a_json_that_is_misspelt_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pictures are members, so that what JSON says of them is somebody's own."""
    pictures, _ = digits()
    texts: list[dict[str, Any]] = [
        {"answer": "a", "promt": "q", "imges": "x"},
        {"caption": "a", "prompt": "q", "image_": "x"},
    ]
    members = [
        member
        for n, text in enumerate(texts)
        for member in ((f"{n}.png", encoded(pictures[n])), (f"{n}.json", json.dumps(text).encode()))
    ]
    opened(write_tar(tmp_path / "s.tar", members))
    (line,) = [each for each in caplog.messages if "which is not read" in each]
    assert "1 of 2 samples have the key 'promt', which is not read; did you mean 'prompt'? (s.tar/0)" in line


def test_videos_in_shards(tmp_path: Path) -> None:
    pytest.importorskip("av")
    clip = write_clip(tmp_path / "a.mp4").read_bytes()
    write_tar(
        tmp_path / "s.tar", [("v.mp4", clip), ("v.txt", b"gray"), ("w.mp4", clip[:900]), ("w.txt", b"x")]
    )
    more: dict[str, Any] = {
        "vlm": {"max_images": 3, "video": {"uniform": {"min_frames": 3, "max_frames": 3}}}
    }
    with pytest.raises(DataError, match=r"s\.tar: w: cannot read the video w\.mp4"):
        open_source(tmp_path / "s.tar", "vlm/webdataset", **more)
    data = {"vlm/webdataset": {"unreadable": "mask"}}
    rows = rows_of(open_source(tmp_path / "s.tar", "vlm/webdataset", data=data, **more))
    assert brightness(rows[0]) == pytest.approx([0, 6 * 20, 6 * 39], abs=8)
    assert [int(row["unreadable"]) for row in rows] == [0, 1]


def test_the_index_is_remembered_and_verified(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = shard(tmp_path / "s.tar")
    read, calls = tar_module.read_groups, []

    def counted(tar: Path) -> Any:
        calls.append(tar)
        return read(tar)

    monkeypatch.setattr(tar_module, "read_groups", counted)
    first = opened(path).fingerprint
    assert opened(path).fingerprint == first
    assert len(calls) == 1
    (known,) = (cache / "forge" / "webdataset").glob("*.json")
    known.write_text(known.read_text().replace("n1", "n7"))  # somebody changes it
    assert opened(path).fingerprint == first
    assert "is damaged, and made again" in caplog.text
    known.write_text(known.read_text()[:50])
    assert opened(path).fingerprint == first
    assert len(calls) == 3
    shard(path, 0, 5)  # another tar of the same name
    assert len(opened(path)) == 5


def test_a_copy_elsewhere_is_the_same_data_set(tmp_path: Path) -> None:
    path = shard(tmp_path / "s.tar")
    first = opened(path).fingerprint
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "s.tar").write_bytes(path.read_bytes())
    assert opened(tmp_path / "b" / "s.tar").fingerprint == first
    members = [m for n in range(4) for m in member(f"{n:04}", n + (n == 2), f"n{n}")]
    assert opened(write_tar(path, members)).fingerprint != first


BROKEN: dict[str, tuple[Any, str]] = {
    "inside an image": (lambda content: content[:700], r"s\.tar is broken or cut short"),
    "between members": (lambda content: content[: 2 * 1024], "it lacks the mark of its end"),
    "a damaged header": (
        lambda content: content[:2048] + b"x" * 64 + content[2112:],
        "broken or cut short at byte 2048",
    ),
    "compressed": (gzip.compress, "is compressed with gzip, so that nothing in it can be read by offset"),
    "no tar": (lambda content: b"x" * 4096, r"s\.tar is broken or cut short"),
    "empty": (lambda content: b"", r"s\.tar is broken or cut short"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_tar_is_named(tmp_path: Path, how: str) -> None:
    path = shard(tmp_path / "s.tar")
    change, message = BROKEN[how]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        opened(path)


def test_images_and_videos_of_one_sample(tmp_path: Path) -> None:
    """Frames of brightness 0, 60 and 120, and a picture in the middle."""
    pytest.importorskip("av")
    clip = write_clip(tmp_path / "a.mp4", 21).read_bytes()
    text = json.dumps({"prompt": "<video>x<image>y<video>", "answer": "z"}).encode()
    picture = encoded(Image.new("RGB", (8, 8), (9, 9, 9)))
    members = [("v.mp4", clip), ("v.1.mp4", clip), ("v.png", picture), ("v.json", text)]
    path = write_tar(tmp_path / "s.tar", members)
    three = {"uniform": {"min_frames": 3, "max_frames": 3}}
    more: dict[str, Any] = {"vlm": {"max_images": 7, "video": three}, "train": {"seq_len": 48}}
    (row,) = rows_of(open_source(path, "vlm/webdataset", **more))
    assert brightness(row) == pytest.approx([0, 60, 120, 9, 0, 60, 120], abs=4)


WRONG: dict[str, tuple[list[Member], str]] = {
    "a sample twice": (
        [*member("a", 0, "x"), *member("b", 1, "y"), *member("a", 2, "z")],
        r"s\.tar: the sample a comes twice, with other samples between",
    ),
    "a member twice": (
        [*member("a", 0, "x"), ("a.png", b"")],
        r"s\.tar: the sample a has two members a\.png",
    ),
    "no text": (member("a", 0, "x")[:1], r"s\.tar: a: it has no \.json and no \.txt, but png"),
    "no image": (member("a", 0, "x")[1:], r"s\.tar: a: it has no image and no video, but txt"),
    "no JSON": ([*member("a", 0, "x")[:1], ("a.json", b"{")], r"s\.tar: a: not JSON"),
    "no UTF-8": ([*member("a", 0, "x")[:1], ("a.txt", b"\xff")], r"s\.tar: a\.txt is no text in UTF-8"),
    "no answer": (
        [*member("a", 0, "x")[:1], ("a.json", b'{"prompt": "x"}')],
        r"s\.tar: a: neither messages nor the text of an answer",
    ),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_sample_is_named(tmp_path: Path, how: str) -> None:
    members, message = WRONG[how]
    with pytest.raises(DataError, match=message):
        opened(write_tar(tmp_path / "s.tar", members))


def test_text_alone_where_it_is_asked_for(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", [*member("a", 0, "x"), *member("b", 0, "y")[1:]])
    assert [bool(row["present"].any()) for row in rows_of(opened(path, need_images=False))] == [True, False]


def test_a_broken_image_is_named_or_masked(tmp_path: Path) -> None:
    pictures, _ = digits()
    members = [*member("a", 0, "x"), ("b.png", encoded(pictures[1])[:60]), ("b.txt", b"y")]
    path = write_tar(tmp_path / "s.tar", members)
    with pytest.raises(DataError, match=r"s\.tar/b: cannot read the image b\.png of .*s\.tar"):
        rows_of(opened(path))
    rows = rows_of(opened(path, unreadable="mask"))
    assert answers_of(rows) == ["x|", ""]


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    path = shard(tmp_path / "s.tar")
    blob = Blob(path, "0000.png", 512, 100)
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(DataError, match=r"s\.tar ends inside 0000\.png: it is cut short"):
        blob.bytes()
