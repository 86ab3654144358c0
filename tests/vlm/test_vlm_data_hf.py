"""Hugging Face data sets with images: by number and as streams, in the forms that they have."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vlmdatakit import answers_of, configured, digits, encoded, open_source, rows_of, stream_of
from vlmkit import tables

from forge_core.data.order import StreamOrder
from forge_core.data.source import SequentialSource
from forge_core.data.stream import SampleStream
from forge_core.errors import DataError
from forge_core.plugins import PluginCatalog, Plugins
from forge_core.testing import run_tiny, tiny_config

datasets = pytest.importorskip("datasets")
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def saved(folder: Path, columns: dict[str, Any], features: dict[str, Any] | None = None) -> Path:
    given = None if features is None else datasets.Features(features)
    datasets.Dataset.from_dict(columns, features=given).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def labelled(folder: Path, count: int = 12) -> Path:
    """Pictures as the library keeps them, and numbers of classes."""
    pictures, labels = digits()
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    return saved(folder, {"image": pictures[:count], "label": labels[:count]}, features)


LABEL = {"vlm/hf": {"answer": "label", "question": "Which? "}}


def test_pictures_and_classes(tmp_path: Path) -> None:
    rows = rows_of(open_source(labelled(tmp_path), "vlm/hf", data=LABEL))
    pictures, labels = digits()
    assert answers_of(rows) == [NAMES[label] + "|" for label in labels[:12]]
    for row, picture in zip(rows, pictures, strict=False):
        assert np.array_equal(row["pixels"][0], np.asarray(picture).transpose(2, 0, 1))
        assert row["present"].tolist() == [True, False]
        assert bytes(row["tokens"][4:11].tolist()) == b"Which? "


def test_lists_bytes_and_paths(tmp_path: Path) -> None:
    """A list of pictures a row, none at all, plain bytes, and paths beside the data set."""
    pictures, _ = digits()
    many = {"images": [pictures[:2], [], pictures[2:3]], "answer": ["ab", "c", "d"]}
    rows = rows_of(open_source(saved(tmp_path, many), "vlm/hf"))
    assert [int(row["present"].sum()) for row in rows] == [2, 0, 1]
    assert np.array_equal(rows[2]["pixels"][0], np.asarray(pictures[2]).transpose(2, 0, 1))
    (tmp_path / "b").mkdir()
    content = {"picture": [encoded(each) for each in pictures[:3]], "answer": ["a", "b", "c"]}
    options = {"vlm/hf": {"images": ["picture"]}}
    other = rows_of(open_source(saved(tmp_path / "b", content), "vlm/hf", data=options))
    assert np.array_equal(other[1]["pixels"][0], np.asarray(pictures[1]).transpose(2, 0, 1))
    (tmp_path / "c").mkdir()
    path = saved(tmp_path / "c", {"image": ["1.png", "2.png"], "answer": ["a", "b"]})
    for number in (1, 2):
        pictures[number].save(path / f"{number}.png")
    named = rows_of(open_source(path, "vlm/hf"))
    assert np.array_equal(named[1]["pixels"][0], np.asarray(pictures[2]).transpose(2, 0, 1))


def test_conversations_with_images_in_their_parts(tmp_path: Path) -> None:
    pictures, _ = digits()
    turns = [
        {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "two"}]},
    ]
    path = saved(tmp_path, {"image": pictures[2:4], "messages": [turns, turns]})
    row = rows_of(open_source(path, "vlm/hf", data={"vlm/hf": {"template": "plain"}}))[0]
    assert answers_of([row]) == ["two|"]
    assert row["image_places"][0] == len("User: ")


def test_parquet_and_jsonl_files(tmp_path: Path) -> None:
    pictures, labels = digits()
    columns = {"image": pictures[:6], "answer": [NAMES[label] for label in labels[:6]]}
    datasets.Dataset.from_dict(columns).to_parquet(str(tmp_path / "a.parquet"))
    rows = rows_of(open_source(tmp_path / "a.parquet", "vlm/hf"))
    assert answers_of(rows) == [NAMES[label] + "|" for label in labels[:6]]
    assert np.array_equal(rows[5]["pixels"][0], np.asarray(pictures[5]).transpose(2, 0, 1))


def test_questions_about_one_picture_are_on_one_side(tmp_path: Path) -> None:
    pictures, _ = digits()
    columns = {
        "image": [pictures[n // 3] for n in range(90)],
        "answer": [f"{n // 3}" for n in range(90)],
    }
    path = saved(tmp_path, columns)
    sides = {}
    for split in ("train", "holdout"):
        source = open_source(path, "vlm/hf", split=split, data={"holdout": 0.3})
        sides[split] = set(answers_of(rows_of(source)))
    assert not sides["train"] & sides["holdout"]
    assert len(sides["train"] | sides["holdout"]) == 30
    assert sides["holdout"]


def test_fingerprint_changes_with_pictures_and_not_with_the_place(tmp_path: Path) -> None:
    first = open_source(labelled(tmp_path), "vlm/hf", data=LABEL).fingerprint
    (tmp_path / "other").mkdir()
    assert open_source(labelled(tmp_path / "other"), "vlm/hf", data=LABEL).fingerprint == first
    (tmp_path / "third").mkdir()
    pictures, labels = digits()
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    changed = [*pictures[:11], pictures[40]]
    path = saved(tmp_path / "third", {"image": changed, "label": labels[:12]}, features)
    assert open_source(path, "vlm/hf", data=LABEL).fingerprint != first


STREAM = {"vlm/hf": {**LABEL["vlm/hf"], "streaming": True}}


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[key], theirs[key]) for key in ours)


def test_a_stream_gives_the_rows_that_numbers_give(tmp_path: Path) -> None:
    path = labelled(tmp_path)
    for more in ({}, {"pack": True}):
        numbered = rows_of(open_source(path, "vlm/hf", data={"vlm/hf": {**LABEL["vlm/hf"], **more}}))
        stream = open_source(path, "vlm/hf", data={"vlm/hf": {**STREAM["vlm/hf"], **more}})
        assert isinstance(stream, SequentialSource)
        streamed = list(stream.once())
        assert len(streamed) == len(numbered)
        assert all(same(ours, theirs) for ours, theirs in zip(streamed, numbered, strict=True))
        endless = list(islice(stream.at(0), 2 * len(numbered) + 3))
        for position in (1, len(numbered) - 1, len(numbered) + 2):
            again = list(islice(stream.at(position), 3))
            assert all(same(a, b) for a, b in zip(again, endless[position : position + 3], strict=True))


def test_samples_left_out_at_the_end_of_an_epoch_of_a_stream_are_counted_in_the_next(tmp_path: Path) -> None:
    path = saved(tmp_path, {"answer": ["a", "x" * 99, "b", "x" * 99, "x" * 99]})
    data = {"vlm/hf": {"streaming": True, "too_long": "drop"}}
    rows = islice(open_source(path, "vlm/hf", data=data).at(0), 6)
    assert [int(row["left_out"]) for row in rows] == [0, 1, 2, 1, 2, 1]
    assert int(next(open_source(path, "vlm/hf", data=data).at(2))["left_out"]) == 2


def test_a_stream_with_other_text_around_its_pictures_is_another(tmp_path: Path) -> None:
    path = labelled(tmp_path)
    one, same_one = (open_source(path, "vlm/hf", data=STREAM).fingerprint for _ in range(2))
    assert one == same_one
    assert open_source(path, "vlm/hf", data=STREAM, vlm={"before_image": "<"}).fingerprint != one


def test_a_stream_holds_its_position_over_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank and two read the same; a rank leaves out pictures that are not its own."""
    path = labelled(tmp_path, 24)
    source = open_source(path, "vlm/hf", data=STREAM)
    with closing(SampleStream([source], StreamOrder(), batch_size=4, global_batch=4)) as one:
        straight = [one.take(1)[0]["pixels"] for _ in range(5)]
        state = one.state_dict()
        more = [one.take(1)[0]["pixels"] for _ in range(3)]
    ranks = []
    for rank in range(2):
        mine = open_source(path, "vlm/hf", data=STREAM)
        read: list[Any] = []
        monkeypatch.setattr(mine.build, "read", counted(mine.build.read, read))
        with closing(
            SampleStream([mine], StreamOrder(), batch_size=2, data_rank=rank, data_size=2, global_batch=4)
        ) as stream:
            stream.load_state_dict(state)
            ranks.append([stream.take(1)[0]["pixels"] for _ in range(3)])
        assert len(read) == 6
    for step in range(3):
        joined = np.concatenate([ranks[0][step], ranks[1][step]])
        assert np.array_equal(joined, more[step])
    assert len(straight) == 5


def counted(read: Any, calls: list[Any]) -> Any:
    def wrapped(pictures: Any) -> Any:
        calls.append(pictures)
        return read(pictures)

    return wrapped


def test_what_a_stream_cannot_do_is_refused(tmp_path: Path) -> None:
    path = labelled(tmp_path)
    with pytest.raises(DataError, match="nothing can be held out of a stream"):
        open_source(path, "vlm/hf", split="holdout", data={**STREAM, "holdout": 0.1})
    packed = {"vlm/hf": {**STREAM["vlm/hf"], "pack": True}, "packing": "best_fit"}
    with pytest.raises(DataError, match="best_fit needs the length of every sample"):
        open_source(path, "vlm/hf", data=packed)
    hub = open_source("somebody/something", "vlm/hf", data=STREAM)
    assert "names no commit" in hub.unrepeatable


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    pictures, _ = digits()
    path = saved(tmp_path, {"image": pictures[:2], "text": ["a", "b"]})
    with pytest.raises(DataError, match="no column 'answer'; there is: image, text"):
        open_source(path, "vlm/hf")
    (tmp_path / "b").mkdir()
    two = {"image": pictures[:2], "prompt": ["<image>", "<image> <image>"], "answer": ["a", "b"]}
    path = saved(tmp_path / "b", two)
    with pytest.raises(DataError, match="saved row 1: 2 placeholders <image> for 1 image"):
        open_source(path, "vlm/hf")
    with pytest.raises(DataError, match="saved row 1: 2 placeholders <image> for 1 image"):
        list(open_source(path, "vlm/hf", data={"vlm/hf": {"streaming": True}}).once())
    (tmp_path / "c").mkdir()
    broken = {"image": [encoded(pictures[0]), encoded(pictures[1])[:60]], "answer": ["a", "b"]}
    path = saved(tmp_path / "c", broken)
    with pytest.raises(DataError, match="row 1: cannot read the image row 1 image"):
        rows_of(open_source(path, "vlm/hf"))
    masked = rows_of(open_source(path, "vlm/hf", data={"vlm/hf": {"unreadable": "mask"}}))
    assert [int(row["unreadable"]) for row in masked] == [0, 1]
    assert answers_of(masked) == ["a|", ""]


def test_a_folder_of_pictures_with_their_metadata(tmp_path: Path) -> None:
    pictures, _ = digits()
    (tmp_path / "data").mkdir()
    lines = []
    for number in range(4):
        pictures[number].save(tmp_path / "data" / f"{number}.png")
        lines.append(f'{{"file_name": "{number}.png", "answer": "a{number}"}}\n')
    (tmp_path / "data" / "metadata.jsonl").write_text("".join(lines), encoding="utf-8")
    data = {"cache_dir": str(tmp_path / "cache")}
    for more in ({}, {"vlm/hf": {"streaming": True}}):
        rows = rows_of(open_source(tmp_path / "data", "vlm/hf", data={**data, **more}))
        assert sorted(answers_of(rows)) == ["a0|", "a1|", "a2|", "a3|"]
        for row, answer in zip(rows, answers_of(rows), strict=True):
            expected = np.asarray(pictures[int(answer[1])]).transpose(2, 0, 1)
            assert np.array_equal(row["pixels"][0], expected)


def test_pictures_in_sizes_of_their_own(tmp_path: Path) -> None:
    """Photographs of scikit-learn, whole and cut: as many patches as their shapes have."""
    from sklearn.datasets import load_sample_images

    china = load_sample_images().images[0]  # 427 x 640
    pictures = [encoded(Image.fromarray(each), "JPEG") for each in (china, china[:, :200], china[:100])]
    path = saved(tmp_path, {"image": pictures, "answer": ["a", "b", "c"]})
    patches = {"patch_size": 8, "dim": 16, "n_layers": 1, "n_heads": 2, "min_pixels": 64, "max_pixels": 2048}
    vlm = {
        "encoder": {"name": "patches", "patches": patches},
        "connector": {"name": "patch_merger"},
        "max_images": 1,
    }
    for streaming in (False, True):
        data = {"vlm/hf": {"streaming": streaming}}
        rows = rows_of(open_source(path, "vlm/hf", data=data, vlm=vlm, train={"seq_len": 64}))
        grids = [row["grids"][0].tolist() for row in rows]
        assert grids == [[1, 4, 6], [1, 8, 2], [1, 2, 14]]
        assert [int((row["image_index"] >= 0).sum()) for row in rows] == [h * w // 4 for _, h, w in grids]
        assert rows[0]["patches"][:24].std() > 10


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_trains_and_answers_held_out_pictures(tmp_path: Path, streaming: bool) -> None:
    """By number a part is held out; a stream is evaluated on another data set."""
    path = labelled(tmp_path, 40)
    options = {**LABEL["vlm/hf"], "streaming": streaming}
    found = tables(path, data={"source": "vlm/hf", "vlm/hf": options, "holdout": 0.0 if streaming else 0.3})
    found["vlm"]["answer_tokens"] = 4
    found["train"] |= {"max_steps": 4}
    found["eval"] = {"steps": 2}
    if streaming:
        found["eval"]["sets"] = [{"name": "held", "source": "vlm/hf", "path": str(path), "vlm/hf": options}]
    plugins = Plugins()
    done = run_tiny(tiny_config(plugins=plugins, **found), plugins)
    assert np.isfinite(done.losses).all()
    assert len(done.metric("eval/held/loss" if streaming else "eval/loss")) == 1
    assert 0 <= done.metric("eval/exact_match")[0] <= 1
    assert sum(done.metric("data/images")) == 8


def test_its_name_stands_beside_that_of_the_source_of_text() -> None:
    plugins = Plugins()
    plugins.load("vlm")
    names = list(PluginCatalog(plugins).component_names("data_source"))
    assert {"hf", "vlm/hf", "vlm/images"} <= set(names)
    assert "images" not in names


@pytest.mark.parametrize("streaming", [False, True])
def test_processes_that_read_keep_the_order(tmp_path: Path, streaming: bool) -> None:
    path = labelled(tmp_path, 24)
    found = []
    for workers in (0, 1 if streaming else 2):
        options = {**LABEL["vlm/hf"], "streaming": streaming}
        data = {"source": "vlm/hf", "path": str(path), "num_workers": workers, "vlm/hf": options}
        config, component = configured(data)
        with closing(stream_of(config, component, batch_size=4, window=4)) as stream:
            found.append([stream.take(1)[0] for _ in range(9)])
    for ours, theirs in zip(*found, strict=True):
        assert all(np.array_equal(ours[key], theirs[key]) for key in ours)
    assert len({tuple(batch["pixels"].flatten().tolist()) for batch in found[0]}) > 5


def test_the_only_column_of_images_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pictures, _ = digits()
    for number, (kind, values) in enumerate(
        (
            (datasets.Image(), pictures[:3]),
            (datasets.Sequence(datasets.Image()), [pictures[:2], [], pictures[2:3]]),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        features = {"picture": kind, "answer": datasets.Value("string")}
        path = saved(folder, {"picture": values, "answer": ["a", "b", "c"]}, features)
        counts = [1, 1, 1] if number == 0 else [2, 0, 1]
        for streaming in (False, True):
            caplog.clear()
            with caplog.at_level("INFO", logger="forge.data"):
                rows = rows_of(open_source(path, "vlm/hf", data={"vlm/hf": {"streaming": streaming}}))
            assert [int(row["present"].sum()) for row in rows] == counts
            assert f"{path}: its images are in the column 'picture'" in caplog.text
            assert "no picture" not in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
def test_videos_are_not_taken_for_text_alone(tmp_path: Path, streaming: bool) -> None:
    clips = [{"bytes": b"what a file would hold", "path": None}] * 2
    columns = {"clip": clips, "answer": ["a", "b"]}
    kinds = {"clip": datasets.Video(decode=False), "answer": datasets.Value("string")}
    path = saved(tmp_path, columns, kinds)
    for images in ([], ["clip"]):
        options = {"streaming": streaming, "images": images}
        with pytest.raises(DataError, match=r"has videos in the column 'clip', and vlm/hf reads images"):
            rows_of(open_source(path, "vlm/hf", data={"vlm/hf": options}))


def test_several_columns_of_images_are_refused_by_name(tmp_path: Path) -> None:
    pictures, _ = digits()
    columns = {"left": pictures[:2], "right": pictures[2:4], "answer": ["a", "b"]}
    kinds = {"left": datasets.Image(), "right": datasets.Image(), "answer": datasets.Value("string")}
    path = saved(tmp_path, columns, kinds)
    with pytest.raises(DataError, match=r"has several columns of images: left, right") as error:
        open_source(path, "vlm/hf")
    assert 'images = ["left"]' in error.value.hint
    with pytest.raises(DataError, match=r"several columns of images: left, right"):
        rows_of(open_source(path, "vlm/hf", data={"vlm/hf": {"streaming": True}}))
    rows = rows_of(open_source(path, "vlm/hf", data={"vlm/hf": {"images": ["right"]}}))
    assert np.array_equal(rows[0]["pixels"][0], np.asarray(pictures[2]).transpose(2, 0, 1))


@pytest.mark.parametrize("streaming", [False, True])
def test_no_picture_at_all_is_told_once(
    tmp_path: Path, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path, {"prompt": ["1+1="] * 12, "answer": [str(n) for n in range(12)]})
    source = open_source(path, "vlm/hf", data={"vlm/hf": {"streaming": streaming}})
    rows_of(source)
    rows_of(source)
    told = [record for record in caplog.records if "no picture in" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING"]
    assert "set images of the source vlm/hf" in told[0].getMessage()


def test_a_path_that_leads_nowhere_is_refused_before_the_hub(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"there is no file or folder {tmp_path}/hfsett"):
        open_source(tmp_path / "hfsett", "vlm/hf")


def bare(folder: Path, values: list[Any], kind: Any) -> Path:
    """A Parquet file that knows nothing of the library: one column of pictures, and numbers as bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = pa.array([bytes([n]) for n in range(len(values))], pa.binary())
    answers = [f"a{n}" for n in range(len(values))]
    told = {"prompt": ["q"] * len(values), "answer": answers}
    table = pa.table({"shown": pa.array(values, kind), "number": numbers, **told})
    pq.write_table(table, folder / "bare.parquet")
    return folder / "bare.parquet"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["struct", "only bytes", "binary", "large", "list of structs", "list"])
def test_parquet_without_metadata(tmp_path: Path, form: str, streaming: bool) -> None:
    """Pictures are known by what is in the column, whatever the file says of it."""
    pa = pytest.importorskip("pyarrow")
    pictures, _ = digits()
    content = [encoded(picture) for picture in pictures[:4]]
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    structs = [{"bytes": each, "path": f"{n}.png"} for n, each in enumerate(content)]
    forms: dict[str, tuple[list[Any], Any]] = {
        "struct": ([*structs[:3], None], struct),
        "only bytes": (
            [*({"bytes": each} for each in content[:3]), None],
            pa.struct([("bytes", pa.binary())]),
        ),
        "binary": ([*content[:3], None], pa.binary()),
        "large": ([*content[:3], None], pa.large_binary()),
        "list of structs": ([structs[:2], structs[2:3], [], structs[3:]], pa.list_(struct)),
        "list": ([content[:2], content[2:3], None, content[3:]], pa.list_(pa.binary())),
    }
    values, kind = forms[form]
    rows = rows_of(
        open_source(bare(tmp_path, values, kind), "vlm/hf", data={"vlm/hf": {"streaming": streaming}})
    )
    counts = [2, 1, 0, 1] if "list" in form else [1, 1, 1, 0]
    assert [int(row["present"].sum()) for row in rows] == counts
    assert answers_of(rows) == ["a0|", "a1|", "a2|", "a3|"]
    second = rows[0]["pixels"][1] if "list" in form else rows[1]["pixels"][0]
    assert np.array_equal(second, np.asarray(pictures[1]).transpose(2, 0, 1))


@pytest.mark.parametrize("streaming", [False, True])
def test_bytes_that_are_no_picture_are_none(
    tmp_path: Path, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pa = pytest.importorskip("pyarrow")
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    path = bare(tmp_path, [{"bytes": b"RIFF sound", "path": "a.wav"}] * 2, struct)
    rows = rows_of(open_source(path, "vlm/hf", data={"vlm/hf": {"streaming": streaming}}))
    assert not any(row["present"].any() for row in rows)
    assert "no picture in" in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
def test_a_picture_that_lacks_or_is_none_is_named_or_masked(tmp_path: Path, streaming: bool) -> None:
    """In a list each has its place, which nothing else takes."""
    pictures, _ = digits()
    content = encoded(pictures[0])
    columns = {
        "image": [[content, None], [content, b"no picture"], [content]],
        "prompt": ["<image><image>", "<image><image>", "<image>"],
        "answer": ["a", "b", "c"],
    }
    path = saved(tmp_path, columns)
    data = {"vlm/hf": {"streaming": streaming}}
    with pytest.raises(DataError, match=r"there is no image row 0 image"):
        rows_of(open_source(path, "vlm/hf", data=data))
    data["vlm/hf"]["unreadable"] = "mask"  # type: ignore[assignment]
    rows = rows_of(open_source(path, "vlm/hf", data=data))
    keys = ("unreadable", "missing")
    assert [[int(row[key]) for row in rows] for key in keys] == [[1, 1, 0], [1, 0, 0]]
    assert answers_of(rows) == ["", "", "c|"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_of_something_else_is_named(tmp_path: Path, streaming: bool) -> None:
    path = saved(tmp_path, {"image": [1, 2], "answer": ["a", "b"]})
    with pytest.raises(DataError, match="row 0 image: an image is bytes or a path, not int"):
        rows_of(open_source(path, "vlm/hf", data={"vlm/hf": {"streaming": streaming}}))


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, {"image": [b"x"] * 3, "answer": ["a", "b", "c"]})
    whole = tmp_path / "whole.parquet"
    datasets.load_from_disk(str(path)).to_parquet(str(whole))
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[:-100])
    for streaming in (False, True):
        with pytest.raises(DataError, match=r"cut\.parquet can(not be read|not be loaded)"):
            rows_of(
                open_source(tmp_path / "cut.parquet", "vlm/hf", data={"vlm/hf": {"streaming": streaming}})
            )
