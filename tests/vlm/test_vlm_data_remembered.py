"""Samples that are laid out once: remembered for what they depend on, and for nothing else."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vlmdatakit import digits, encoded, open_source, rows_of, write_clip, write_tar
from vlmkit import write_samples

from forge_core.errors import DataError
from forge_vlm.data import clips, pixels, record, remembered

PACKED: dict[str, Any] = {
    "max_images": 2,
    "max_patches": 64,
    "encoder": {
        "name": "patches",
        "patches": {"patch_size": 4, "min_pixels": 64, "max_pixels": 256, "dim": 16, "n_heads": 2},
    },
    "connector": {"name": "patch_merger"},
}


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Three samples are enough to be remembered, in a folder of this test."""
    monkeypatch.setattr(remembered, "SMALL", 3)
    monkeypatch.setattr("forge_vlm.data.build.SMALL", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "forge" / "samples"


@pytest.fixture
def laid(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the samples whose text is tokenised."""
    found: list[str] = []
    before = record.Writer.found

    def told(self: Any, name: str, *rest: Any) -> Any:
        found.append(name)
        return before(self, name, *rest)

    monkeypatch.setattr(record.Writer, "found", told)
    return found


def lines(count: int = 8) -> list[dict[str, Any]]:
    return [
        {
            "id": f"s{n}",
            "images": [f"{n % 6}.png", "0.png"][: 1 + n % 2],
            "prompt": f"q{n}? ",
            "answers": ["a", "b", "a"],
            "choices": ["a", "b"],
        }
        for n in range(count)
    ]


def same(left: Any, right: Any) -> None:
    """Two sources have the same rows, questions and fingerprint."""
    assert left.fingerprint == right.fingerprint
    assert [left.question(n) for n in range(len(left))] == [right.question(n) for n in range(len(right))]
    for one, other in zip(rows_of(left), rows_of(right), strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert np.array_equal(one[key], other[key]), key


def test_the_second_start_tokenises_nothing(tmp_path: Path, laid: list[str], many: Path) -> None:
    write_samples(tmp_path, lines())
    first = open_source(tmp_path, "vlm/images")
    assert len(laid) == 8
    second = open_source(tmp_path, "vlm/images")
    assert len(laid) == 8
    same(first, second)
    assert [path.suffix for path in sorted(many.iterdir())] == [".lock", ".samples"]


def test_splits_share_what_is_laid_out(tmp_path: Path, laid: list[str]) -> None:
    write_samples(tmp_path, [{"image": f"{n}.png", "prompt": "q", "answer": str(n)} for n in range(6)])
    whole = len(open_source(tmp_path, "vlm/images"))
    sizes = [
        len(open_source(tmp_path, "vlm/images", split=split, data={"holdout": 0.4}))
        for split in ("train", "holdout")
    ]
    assert sum(sizes) == whole == len(laid)
    assert min(sizes) > 0


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"seq_len": 24}},
        {"data": {"vlm/images": {"question": "?"}}},
        {"data": {"vlm/images": {"template": "plain"}}},
        {"vlm": {"max_images": 3}},
        {"vlm": {"before_image": "<"}},
        {"vlm": {"fusion": "cross_attention", "cross_attention": {"every": 2}}},
    ],
)
def test_what_samples_depend_on_makes_them_anew(
    tmp_path: Path, laid: list[str], change: dict[str, Any]
) -> None:
    write_samples(tmp_path, lines())
    open_source(tmp_path, "vlm/images")
    changed = open_source(tmp_path, "vlm/images", **{key: dict(value) for key, value in change.items()})
    assert len(laid) == 16
    same(changed, open_source(tmp_path, "vlm/images", **{key: dict(value) for key, value in change.items()}))
    assert len(laid) == 16


def test_another_line_makes_them_anew(tmp_path: Path, laid: list[str]) -> None:
    write_samples(tmp_path, lines())
    before = open_source(tmp_path, "vlm/images")
    write_samples(tmp_path, lines(9))
    assert len(open_source(tmp_path, "vlm/images")) == len(before) + 1


@pytest.mark.parametrize("how", ["cut short", "a byte", "the start", "nothing"])
def test_a_damaged_file_is_made_again(
    tmp_path: Path, laid: list[str], many: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_samples(tmp_path, lines())
    first = open_source(tmp_path, "vlm/images")
    (file,) = many.glob("*.samples")
    content = bytearray(file.read_bytes())
    at = len(content) - 100 if how == "a byte" else 2
    content[at] ^= 1
    damaged = {"cut short": bytes(content[:-50]), "nothing": b""}.get(how, bytes(content))
    file.unlink()  # the first source still reads what it has mapped
    file.write_bytes(damaged)
    again = open_source(tmp_path, "vlm/images")
    assert "is damaged, and made again" in caplog.text
    assert len(laid) == 16
    same(first, again)
    open_source(tmp_path, "vlm/images")
    assert len(laid) == 16


def test_an_image_that_is_gone_is_noticed(tmp_path: Path) -> None:
    write_samples(tmp_path, lines())
    before = open_source(tmp_path, "vlm/images")
    (tmp_path / "5.png").write_bytes((tmp_path / "5.png").read_bytes() + b"more")
    assert open_source(tmp_path, "vlm/images").fingerprint != before.fingerprint
    (tmp_path / "5.png").unlink()
    with pytest.raises(DataError, match=r"1 image is not there: .*5\.png of .*data\.jsonl:6: s5"):
        open_source(tmp_path, "vlm/images")


def test_an_image_of_another_size_is_measured_again(tmp_path: Path) -> None:
    """Where images have sizes of their own; one that changes under a run is an error."""
    from PIL import Image

    write_samples(tmp_path, lines())
    source = open_source(tmp_path, "vlm/images", vlm=PACKED, model={"n_layers": 1})
    Image.new("RGB", (16, 8)).save(tmp_path / "3.png")
    with pytest.raises(DataError, match=r"data\.jsonl:4: s3: 3\.png has another size than when the run"):
        source[3]
    again = open_source(tmp_path, "vlm/images", vlm=PACKED, model={"n_layers": 1})
    assert again[3]["grids"][0].tolist()[-2:] == [2, 4]
    assert source[2]["tokens"].tolist() == again[2]["tokens"].tolist()


def test_an_image_of_another_size_beside_a_data_set_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set that holds paths knows nothing of what is in the files."""
    from PIL import Image

    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = tmp_path / "saved"
    columns = {"image": [f"{n}.png" for n in range(5)], "answer": ["a"] * 5}
    datasets.Dataset.from_dict(columns).save_to_disk(str(path))
    found = []
    for width in (8, 16):
        for n in range(5):
            Image.new("RGB", (width, 8)).save(path / f"{n}.png")
        source = open_source(path, "vlm/hf", vlm=PACKED, model={"n_layers": 1})
        found.append(source[3]["grids"][0].tolist())
    assert found == [[1, 2, 2], [1, 2, 4]]


def test_an_image_that_becomes_large_has_pieces(tmp_path: Path) -> None:
    """Also where none had any when samples were laid out."""
    from PIL import Image

    pytest.importorskip("transformers")
    tower = {"image_size": 8, "patch_size": 4, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}
    encoder = {"name": "idefics3", "idefics3": {**tower, "longest_edge": 16, "split": True}}
    vlm = {"max_images": 6, "encoder": encoder, "connector": {"name": "linear"}}
    write_samples(tmp_path, [{"image": f"{n}.png", "answer": "a"} for n in range(5)])
    for n in range(5):
        (tmp_path / f"{n}.png").write_bytes(b"no picture")
    found = []
    for _ in range(2):
        data = {"vlm/images": {"unreadable": "mask"}}
        source = open_source(tmp_path, "vlm/images", vlm=vlm, data=data, train={"seq_len": 48})
        found.append(int(source[3]["present"].sum()))
        Image.new("RGB", (32, 32)).save(tmp_path / "3.png")
    assert found == [0, 5]


def test_a_video_of_another_length_is_looked_at_again(tmp_path: Path) -> None:
    records = [{"video": f"{n}.mp4", "answer": "a"} for n in range(5)]
    write_samples(tmp_path, records)
    for n in range(5):
        write_clip(tmp_path / f"{n}.mp4", 20)
    tables = {"vlm": {"max_images": 4}, "train": {"seq_len": 48}}
    found = []
    for frames in (20, 2):
        write_clip(tmp_path / "2.mp4", frames)
        source = open_source(tmp_path, "vlm/images", **{k: dict(v) for k, v in tables.items()})
        found.append(int(source[2]["present"].sum()))
    assert found == [4, 2]


class Failing:
    """A file that cannot be read for a while, as on a file system of a network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.number: int | None = None
        before, image = Path.open, pixels.pillow()
        opened = image.open

        def told(path: Any) -> None:
            if self.number is not None and Path(str(path)).name == name:
                raise OSError(self.number, os.strerror(self.number))

        def by_path(path: Path, *args: Any, **more: Any) -> Any:
            told(path)
            return before(path, *args, **more)

        def by_pillow(source: Any, *args: Any, **more: Any) -> Any:
            told(source)
            return opened(source, *args, **more)

        monkeypatch.setattr(Path, "open", by_path)
        monkeypatch.setattr(image, "open", by_pillow)
        av = pytest.importorskip("av")
        container = av.open

        def by_av(source: Any, *args: Any, **more: Any) -> Any:
            told(source)
            return container(source, *args, **more)

        monkeypatch.setattr(av, "open", by_av)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENFILE, errno.ETIMEDOUT, errno.EACCES])
def test_a_picture_that_cannot_be_read_just_now_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, many: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Masked while it cannot be read, also when it can be again but has no place; seen at the next start."""
    from PIL import Image

    write_samples(tmp_path, lines())
    Image.new("RGB", (16, 16)).save(tmp_path / "4.png")
    expected = open_source(tmp_path, "vlm/images", vlm=PACKED, model={"n_layers": 1})[4]
    for file in many.glob("*.samples"):
        file.unlink()
    failing = Failing(monkeypatch, "4.png")
    failing.number = number
    mask = {"vlm/images": {"unreadable": "mask"}}
    source = open_source(tmp_path, "vlm/images", vlm=PACKED, model={"n_layers": 1}, data=dict(mask))
    assert (source[4]["present"].sum(), source[4]["unreadable"]) == (0, 1)
    assert "samples are laid out again at the next start: cannot read the image" in caplog.text
    failing.number = None
    assert (source[4]["present"].sum(), source[4]["unreadable"]) == (0, 1)
    del source
    again = open_source(tmp_path, "vlm/images", vlm=PACKED, model={"n_layers": 1}, data=dict(mask))[4]
    for key in expected:
        assert np.array_equal(expected[key], again[key]), key
    assert len(list(many.glob("*.samples"))) == 1


def test_a_picture_that_cannot_be_read_just_now_is_an_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(tmp_path, lines())
    Failing(monkeypatch, "4.png").number = errno.EIO
    with pytest.raises(DataError, match=r"data\.jsonl:5: s4: cannot read the image .*4\.png.*Input/output"):
        open_source(tmp_path, "vlm/images", vlm=PACKED, model={"n_layers": 1})


def test_a_picture_that_is_broken_is_remembered(
    tmp_path: Path, laid: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_samples(tmp_path, lines())
    (tmp_path / "4.png").write_bytes(b"no picture")
    for _ in range(2):
        data = {"vlm/images": {"unreadable": "mask"}}
        open_source(tmp_path, "vlm/images", vlm=PACKED, model={"n_layers": 1}, data=data)
    assert len(laid) == 8


@pytest.mark.parametrize(
    ("source", "how"),
    [
        ("vlm/images", "open"),
        ("vlm/images", "stat"),
        ("vlm/webvid", "open"),
        ("vlm/webvid", "stat"),
        ("vlm/webdataset", "open"),
    ],
)
def test_a_video_that_cannot_be_read_just_now_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, how: str
) -> None:
    """Neither its length nor the samples of the source."""
    monkeypatch.setattr(clips, "SMALL", 2)
    videos = [write_clip(tmp_path / f"{n}.mp4", 20) for n in range(4)]
    write_samples(tmp_path, [{"video": each.name, "answer": "a"} for each in videos])
    rows = "".join(f"{n},{n}.mp4,a\n" for n in range(4))
    (tmp_path / "list.csv").write_text(f"videoid,file,name\n{rows}", encoding="utf-8")
    for each in videos:
        write_tar(tmp_path / f"{each.stem}.tar", [(each.name, each.read_bytes()), (f"{each.stem}.txt", b"a")])

    def opened() -> Any:
        options: dict[str, Any] = {"unreadable": "mask"}
        if source == "vlm/webvid":
            options |= {"videos": "{file}"}
        tables: dict[str, Any] = {"vlm": {"max_images": 4}, "train": {"seq_len": 48}}
        return open_source(tmp_path, source, data={source: options}, **tables)

    bad = "2.tar" if source == "vlm/webdataset" else "2.mp4"
    if how == "open":
        failing = Failing(monkeypatch, bad)
        if source == "vlm/webdataset":
            opened()  # what is in the tars is known
            for known in (tmp_path / "cache" / "forge").glob("[cs]*/*.*"):
                known.unlink()
        failing.number = errno.EIO
        first = opened()
        assert int(first[2]["present"].sum()) == 0
        failing.number = None
    else:
        before = Path.is_file

        def stale(path: Path) -> bool:
            if path.name == bad:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return before(path)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "is_file", stale)
            opened()
    assert [int(opened()[n]["present"].sum()) for n in range(4)] == [4] * 4


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write_samples(tmp_path, lines())
    assert len(open_source(tmp_path, "vlm/images")) == 8
    assert "its text is tokenised at every start" in caplog.text


def test_runs_that_start_at_once_share_the_work(
    tmp_path: Path, laid: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three lays all out, the others the first few and then wait for it."""
    write_samples(tmp_path, lines(40))
    monkeypatch.setattr("forge_core.data.cache._POLL", 0.01)
    before = remembered.Remembered.hold

    def slow(self: Any) -> None:
        before(self)
        time.sleep(0.3)

    monkeypatch.setattr(remembered.Remembered, "hold", slow)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(open_source(tmp_path, "vlm/images"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(laid) == 40 + 2 * 4
    same(found[0], found[1])
    same(found[0], found[2])


def test_those_that_wait_have_the_error_of_the_first(
    tmp_path: Path, laid: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(tmp_path, [*lines(40), {"id": "bad", "image": "0.png"}])
    monkeypatch.setattr("forge_core.data.cache._POLL", 0.01)
    ready = threading.Barrier(2)
    before = remembered.Remembered.hold

    def together(self: Any) -> None:
        ready.wait(10)
        before(self)

    monkeypatch.setattr(remembered.Remembered, "hold", together)
    found: list[str] = []

    def one() -> None:
        try:
            open_source(tmp_path, "vlm/images")
        except DataError as error:
            found.append(error.message)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert len(set(found)) == 1
    assert "data.jsonl:41: bad: neither messages nor" in found[0]
    assert len(laid) == 41 + 4
    write_samples(tmp_path, lines(40))
    monkeypatch.setattr(remembered.Remembered, "hold", before)
    assert len(open_source(tmp_path, "vlm/images")) == 40


def other_sources(folder: Path) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    pictures, labels = digits()
    members = [
        (f"{n:03}.{kind}", content)
        for n in range(9)
        for kind, content in (("png", encoded(pictures[n])), ("txt", str(labels[n]).encode()))
    ]
    write_tar(folder / "0.tar", members[:10])
    write_tar(folder / "1.tar", members[10:])
    yield "vlm/webdataset", folder, {}
    (folder / "list.csv").write_text(
        "videoid,page_dir,name\n" + "".join(f"{n},a,clip {n}\n" for n in range(5)), encoding="utf-8"
    )
    for n in range(5):
        write_clip(folder / "videos" / "a" / f"{n}.mp4", 12)
    yield "vlm/webvid", folder / "list.csv", {"vlm": {"max_images": 4}, "train": {"seq_len": 48}}
    datasets = pytest.importorskip("datasets")
    columns = {"image": pictures[:9], "answer": [str(label) for label in labels[:9]]}
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "saved"))
    yield "vlm/hf", folder / "saved", {}


def test_every_source_remembers(tmp_path: Path, laid: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for source, path, tables in other_sources(tmp_path):
        first = open_source(path, source, **{key: dict(value) for key, value in tables.items()})
        count = len(laid)
        assert count == len(first)
        same(first, open_source(path, source, **{key: dict(value) for key, value in tables.items()}))
        assert len(laid) == count, source
        laid.clear()


def test_a_rewritten_shard_or_data_set_is_read_again(tmp_path: Path) -> None:
    pictures, _ = digits()
    for word in ("one", "two"):
        members = [
            (f"{n}.{kind}", content)
            for n in range(5)
            for kind, content in (("png", encoded(pictures[n])), ("txt", word.encode()))
        ]
        write_tar(tmp_path / "0.tar", members)
        os.utime(tmp_path / "0.tar", ns=(0, 10**18 + len(word) + ord(word[0])))
        row = open_source(tmp_path, "vlm/webdataset")[0]
        assert bytes(row["targets"][row["targets"] >= 0].tolist()[:3]) == word.encode()
