"""Data that is not right, source by source: named, masked and counted, or one clear error; and pictures and
videos of rare kinds, seen as they are meant to be seen."""

from __future__ import annotations

import io
import json
import struct
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps
from vlmdatakit import answers_of, brightness, encoded, open_source, rows_of, write_clip, write_tar
from vlmkit import write_samples

from forge_core.errors import DataError
from forge_vlm.data.frames import Clip
from forge_vlm.data.options import WebVidOptions
from forge_vlm.data.picture import Blob, Frame
from forge_vlm.data.pixels import read_pixels, size_of
from forge_vlm.data.video import look_at, read_frames
from forge_vlm.data.webvid import read_rows
from forge_vlm.geometry import ImageGeometry, PackedGeometry

SQUARE = ImageGeometry(size=8, grid=4, dim=8)
RAMP = np.tile((np.arange(8) * 36).astype(np.uint8), (8, 1))
GRAY = Image.fromarray(RAMP)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


# Pictures of rare kinds.


def stored(picture: Any, kind: str, **options: Any) -> bytes:
    content = io.BytesIO()
    picture.save(content, kind, **options)
    return content.getvalue()


def png(bits: int, colour: int, rows: bytes) -> bytes:
    """A PNG of 8 x 8, written by hand."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", 8, 8, bits, colour, 0, 0, 0)
    content = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + content


def sixteen(channels: int) -> bytes:
    return b"".join(b"\0" + b"".join(struct.pack(">H", int(v) * 257) * channels for v in row) for row in RAMP)


KINDS: dict[str, bytes] = {
    "gray": stored(GRAY, "PNG"),
    "gray with alpha": stored(GRAY.convert("LA"), "PNG"),
    "colour with alpha": stored(GRAY.convert("RGBA"), "PNG"),
    "palette": stored(GRAY.convert("P"), "PNG"),
    "palette, one entry transparent": stored(GRAY.convert("P"), "PNG", transparency=3),
    "palette with alpha": stored(GRAY.convert("P"), "PNG", transparency=bytes(range(256))),
    "gray of 16 bits": png(16, 0, sixteen(1)),
    "colour of 16 bits": png(16, 2, sixteen(3)),
    "gray of 16 bits as TIFF": stored(Image.fromarray(RAMP.astype(np.uint16) * 257), "TIFF"),
    "gray of 16 bits as PGM": b"P5 8 8 65535\n" + (RAMP.astype(">u2") * 257).tobytes(),
    "inks": stored(GRAY.convert("RGB").convert("CMYK"), "TIFF"),
    "inks as JPEG": stored(GRAY.convert("RGB").convert("CMYK"), "JPEG", quality=100),
    "the first of several frames": stored(
        GRAY, "GIF", save_all=True, append_images=[Image.new("L", (8, 8), 9)]
    ),
    "the first of several frames as WEBP": stored(
        GRAY.convert("RGB"), "WEBP", save_all=True, append_images=[Image.new("RGB", (8, 8))], lossless=True
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_of_every_kind_look_alike(kind: str) -> None:
    pixels = read_pixels(KINDS[kind], SQUARE)
    limit = 2 if "JPEG" in kind else 0
    assert np.abs(pixels.astype(int) - RAMP.astype(int)).max() <= limit
    assert size_of(KINDS[kind]) == (8, 8)


@pytest.mark.parametrize("held", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_pictures_are_seen_as_the_camera_was_held(held: int, kind: str) -> None:
    """As Pillow's own way of turning them, and measured as they are read."""
    values = np.random.default_rng(0).integers(0, 256, (4, 8, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = held
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    content = stored(Image.fromarray(values).resize((64, 32)), kind, exif=exif, **options)
    with Image.open(io.BytesIO(content)) as opened:
        turned = ImageOps.exif_transpose(opened).convert("RGB")
    assert size_of(content) == (turned.height, turned.width) == ((64, 32) if held > 4 else (32, 64))
    expected = np.asarray(turned.resize((8, 8), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert np.array_equal(read_pixels(content, SQUARE), expected)
    packed = PackedGeometry(patch=4, dim=8, least=16, most=1 << 20)
    assert read_pixels(content, packed).shape[1:] == (turned.height, turned.width)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_a_broken_note_of_the_camera_hides_no_picture() -> None:
    content = stored(GRAY, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + bytes(9), quality=100)
    assert np.abs(read_pixels(content, SQUARE).astype(int) - RAMP).max() <= 2


def test_a_pixel_and_pictures_that_are_too_thin_or_too_large() -> None:
    one = stored(Image.new("RGB", (1, 1), (7, 8, 9)), "PNG")
    assert read_pixels(one, SQUARE).reshape(3, -1).T.tolist() == [[7, 8, 9]] * 64
    thin = stored(Image.new("L", (1, 60_000)), "PNG")
    for geometry in (
        ImageGeometry(size=64, grid=4, dim=8, crop=True),
        ImageGeometry(size=64, grid=4, dim=8, pad=True),
    ):
        with pytest.raises(DataError, match="60000 x 1 pixels: the encoder would see a stripe of it"):
            read_pixels(thin, geometry)
    assert read_pixels(thin, ImageGeometry(size=64, grid=4, dim=8)).shape == (3, 64, 64)
    bomb = bytearray(png(8, 0, bytes(99)))
    bomb[16:24] = struct.pack(">II", 60_000, 60_000)
    bomb[29:33] = struct.pack(">I", zlib.crc32(bytes(bomb[12:29])))
    with pytest.raises(DataError, match=r"cannot read the image .*exceeds limit"):
        read_pixels(bytes(bomb), SQUARE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it is of no kind that Pillow knows"),
        (b"", "it is of no kind that Pillow knows"),
        (stored(Image.fromarray(RAMP.astype(np.float32)), "TIFF"), "values are of 32 bits"),
        (stored(Image.fromarray(RAMP.astype(np.int32)), "TIFF"), "values are of 32 bits"),
        (stored(GRAY, "JPEG")[:-60], "[Tt]runcated"),
    ],
)
def test_what_is_no_picture_is_told(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"cannot read the image an image in memory: .*{message}"):
        read_pixels(content, SQUARE)


# Videos of rare kinds.

av = pytest.importorskip("av")


def filmed(path: Path, times: list[int], kind: str | None = None, turn: int = 0, last: int = 1) -> Path:
    """Frames at tenths of a second: gray of 6 n, dark on the left."""
    with av.open(str(path), "w", format=kind) as clip:
        stream: Any = clip.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 64, 32, "yuv420p", 12
        stream.codec_context.time_base = Fraction(1, 10)
        if turn:
            stream.set_display_rotation(turn)
        packets = []
        for number, time in enumerate(times):
            picture = np.full((32, 64, 3), 6 * number + 100, dtype=np.uint8)
            picture[:, :32] = 0
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 10)
            packets += stream.encode(frame)
        packets += stream.encode()
        for packet in packets:
            if packet is packets[-1] and last != 1:
                packet.duration = last
            clip.mux(packet)
    return path


def right_half(pixels: NDArray[np.uint8]) -> float:
    return float(pixels[:, :, 5:].mean())


def test_frames_of_a_variable_rate_are_those_that_are_shown(tmp_path: Path) -> None:
    """Four frames in 0.3 seconds, and one after 3: between them the fourth is shown."""
    for kind in ("mp4", "matroska"):
        path = filmed(tmp_path / f"a.{kind}", [0, 1, 2, 3, 30], kind)
        blob = Blob(path, path.name)
        found = read_frames(blob, [0.0, 0.2, 0.3, 1.2, 2.0, 3.0], SQUARE)
        assert [round((right_half(each) - 100) / 6) for each in found] == [0, 2, 3, 3, 3, 4]


def test_a_last_frame_that_stays_is_not_the_end_of_a_file_cut_short(tmp_path: Path) -> None:
    path = filmed(tmp_path / "a.mp4", [0, 1, 2, 3], last=30)
    blob = Blob(path, path.name)
    look = look_at(blob)
    assert look.seconds == pytest.approx(3.3)
    (frame,) = read_frames(blob, [look.last], SQUARE)
    assert right_half(frame) == pytest.approx(118, abs=4)
    with pytest.raises(DataError, match=r"the video a\.mp4 ends before 9 s"):
        read_frames(blob, [9.0], SQUARE)


@pytest.mark.parametrize("turn", [90, 180, -90])
def test_a_video_is_seen_as_the_camera_was_held(tmp_path: Path, turn: int) -> None:
    path = filmed(tmp_path / "a.mp4", [0, 1, 2], turn=turn)
    blob = Blob(path, path.name)
    (pixels,) = read_frames(blob, [0.0], SQUARE)
    sides = {
        "left": pixels[0, :, :3].mean(),
        "right": pixels[0, :, 5:].mean(),
        "top": pixels[0, :3].mean(),
        "bottom": pixels[0, 5:].mean(),
    }
    with av.open(str(path)) as clip:
        first = next(clip.decode(video=0))
        expected = first.to_image().rotate(first.rotation, expand=True)
    theirs = np.asarray(expected.resize((8, 8), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert np.abs(pixels.astype(int) - theirs).max() <= 1
    dark = min(sides, key=lambda side: sides[side])
    assert dark == {180: "right", 90: "bottom", 270: "top"}[first.rotation % 360]
    shown = look_at(blob, upright=True)
    assert (shown.height, shown.width) == ((32, 64) if turn == 180 else (64, 32))


def test_a_video_that_does_not_say_how_long_it_is(tmp_path: Path) -> None:
    path = filmed(tmp_path / "a.m4v", list(range(20)), "m4v")
    blob = Blob(path, path.name)
    with av.open(str(path)) as clip:
        assert clip.streams.video[0].duration is None
    assert look_at(blob).frames == pytest.approx(20, abs=1)
    (late,) = read_frames(blob, [1.5], SQUARE)
    assert right_half(late) > 150


def test_a_video_without_frames_or_pictures_is_named_or_masked(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "none.mp4"), "w") as clip:
        stream: Any = clip.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        clip.start_encoding()
    (tmp_path / "text.mp4").write_bytes(b"no video")
    (tmp_path / "empty.mp4").write_bytes(b"")
    names = ("none", "text", "empty", "gone")
    write_samples(tmp_path, [{"video": f"{name}.mp4", "prompt": "q", "answer": "a"} for name in names])
    data = {"vlm/images": {"unreadable": "mask"}}
    rows = rows_of(open_source(tmp_path, "vlm/images", data=data))
    assert [int(row["unreadable_videos"]) for row in rows] == [1, 1, 1, 1]
    assert [int(row["missing"]) for row in rows] == [0, 0, 0, 1]
    assert not any((row["targets"] >= 0).any() for row in rows)
    with pytest.raises(DataError, match=r"data\.jsonl:\d"):
        rows_of(open_source(tmp_path, "vlm/images"))


def test_frames_and_looks_are_what_they_were() -> None:
    assert Clip(seconds=0.0, rate=10.0).frames == 1
    assert str(Frame(Blob(Path("a/b.mp4"), "b.mp4"), 1.5)) == "b.mp4 at 1.5 s"


# Lines, tables and shards.

LINES: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "not JSON"),
    "cut short": ('{"answer": "a"', "not JSON"),
    "deep": ("[" * 100_000, "not JSON"),
    "a list": ("[1]", "not an object"),
    "a text": ('"a"', "not an object"),
    "null": ("null", "not an object"),
    "no answer": ("{}", "neither messages nor the text of an answer"),
    "an answer": ('{"answer": 5}', "neither messages nor the text of an answer"),
    "a prompt": ('{"prompt": ["a"], "answer": "a"}', "neither messages nor the text of an answer"),
    "an image": ('{"image": 5, "answer": "a"}', "image is no path"),
    "images": ('{"images": ["0.png", 5], "answer": "a"}', ".*images no list of paths"),
    "both": ('{"image": "0.png", "images": ["1.png"], "answer": "a"}', "it has image and images"),
    "a video": ('{"video": 5, "answer": "a"}', "video is no path"),
    "no name": ('{"image": "a\\u0000.png", "answer": "a"}', "image names a file with the character"),
    "messages": ('{"messages": {}, "answer": "a"}', "messages is dict, no list of messages"),
    "no messages": ('{"messages": []}', "a conversation is a list of messages"),
    "a message": ('{"messages": ["a"]}', "message 0 is no object"),
    "a role": ('{"messages": [{"role": 1, "content": "a"}]}', "message 0: role is no text"),
    "a part": (
        '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
        "message 0: .*neither text",
    ),
    "a part of a part": ('{"messages": [{"role": "user", "content": [[]]}]}', "message 0: .*neither text"),
    "answers": ('{"answers": "a"}', "answers is no list of texts"),
    "choices": ('{"choices": ["a"], "answer": 0}', "one choice is none"),
    "a choice": ('{"choices": ["a", "b"], "answer": 7}', "the answer is choice 7, and there are 2"),
    "half a character": ('{"answer": "a\\ud800"}', "its text has half a character"),
    "placeholders": ('{"image": "0.png", "prompt": "<image><image>", "answer": "a"}', "2 placeholders"),
    "a placeholder in the answer": (
        '{"image": "0.png", "prompt": "<image>", "answer": "<image>"}',
        "2 place",
    ),
}


@pytest.mark.parametrize("how", LINES)
def test_a_wrong_line_is_named_or_left_out(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_samples(tmp_path, [{"image": "0.png", "answer": "fine"}])
    line, message = LINES[how]
    with (tmp_path / "data.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n" + '{"image": "1.png", "answer": "too"}\n')
    with pytest.raises(DataError, match=rf"data\.jsonl:2: {message}"):
        open_source(tmp_path, "vlm/images")
    rows = rows_of(open_source(tmp_path, "vlm/images", data={"vlm/images": {"malformed": "drop"}}))
    assert answers_of(rows) == ["fine|", "too|"]
    assert [int(row["left_out"]) for row in rows] == [0, 1]
    assert "1 of 3 samples left out, as they are no samples" in caplog.text


def test_files_without_samples_are_named(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("\n \n", encoding="utf-8")
    with pytest.raises(DataError, match=r"data\.jsonl leaves no sample"):
        open_source(tmp_path, "vlm/images")
    (tmp_path / "data.jsonl").write_text("[]\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"data\.jsonl leaves no sample"):
        open_source(tmp_path, "vlm/images", data={"vlm/images": {"malformed": "drop"}})
    write_tar(tmp_path / "a.tar", [])
    with pytest.raises(DataError, match=r"a\.tar leaves no sample"):
        open_source(tmp_path / "a.tar", "vlm/webdataset")
    (tmp_path / "a.csv").write_text("videoid,page_dir,name\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.csv leaves no sample"):
        open_source(tmp_path / "a.csv", "vlm/webvid")
    (tmp_path / "b.csv").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match=r"b\.csv leaves no sample"):
        open_source(tmp_path / "b.csv", "vlm/webvid")
    datasets = pytest.importorskip("datasets")
    columns = {"image": datasets.Image(), "answer": datasets.Value("string")}
    empty = datasets.Dataset.from_dict({"image": [], "answer": []}, features=datasets.Features(columns))
    empty.to_parquet(str(tmp_path / "empty.parquet"))
    with pytest.raises(DataError, match=r"cannot be loaded: .*no data"):
        open_source(tmp_path / "empty.parquet", "vlm/hf")
    with pytest.raises(DataError, match="has no sample that can be used"):
        rows_of(open_source(tmp_path / "empty.parquet", "vlm/hf", data={"vlm/hf": {"streaming": True}}))


@pytest.mark.parametrize("source", ["vlm/images", "vlm/webdataset", "vlm/hf", "stream"])
def test_every_source_masks_drops_and_counts_alike(
    tmp_path: Path, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In turn fine, a broken picture, too many placeholders, text that is cut, and fine again."""
    texts = [
        {"prompt": "q", "answer": "a"},
        {"prompt": "q", "answer": "b"},
        {"prompt": "<image><image>", "answer": "c"},
        {"prompt": "q", "answer": "d" * 60},
        {"prompt": "q", "answer": "e"},
    ]
    content = [encoded(Image.new("RGB", (8, 8), (40 * n, 0, 0))) for n in range(5)]
    content[1] = content[1][:50]
    if source == "vlm/images":
        for number, each in enumerate(content):
            (tmp_path / f"{number}.png").write_bytes(each)
        lines = [json.dumps({"image": f"{n}.png", **text}) for n, text in enumerate(texts)]
        (tmp_path / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
        path, name = tmp_path, source
    elif source == "vlm/webdataset":
        members = [(f"{n}.png", each) for n, each in enumerate(content)]
        members += [(f"{n}.json", json.dumps(text).encode()) for n, text in enumerate(texts)]
        path, name = write_tar(tmp_path / "a.tar", sorted(members)), source
    else:
        datasets = pytest.importorskip("datasets")
        columns = {"image": content, **{key: [text[key] for text in texts] for key in ("prompt", "answer")}}
        datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "saved"))
        path, name = tmp_path / "saved", "vlm/hf"
    more = {"streaming": True} if source == "stream" else {}
    with pytest.raises(DataError, match="2 placeholders <image> for 1 image"):
        rows_of(open_source(path, name, data={name: {**more, "unreadable": "mask"}}))
    with pytest.raises(DataError, match="cannot read the image"):
        rows_of(open_source(path, name, data={name: {**more, "malformed": "drop"}}))
    options = {**more, "malformed": "drop", "unreadable": "mask"}
    rows = rows_of(open_source(path, name, data={name: options}))
    keys = ("unreadable", "missing", "cut", "left_out")
    assert {key: [int(row[key]) for row in rows] for key in keys} == {
        "unreadable": [0, 1, 0, 0],
        "missing": [0, 0, 0, 0],
        "cut": [0, 0, 1, 0],
        "left_out": [0, 0, 1, 0],
    }
    assert answers_of(rows) == ["a|", "", "d" * 26 + "|", "e|"]
    assert "1 of 5 samples cut" in caplog.text
    assert "1 of 5 samples left out, as they are no samples" in caplog.text
    caplog.clear()
    rows = rows_of(open_source(path, name, data={name: {**options, "too_long": "drop"}}))
    assert [int(row["left_out"]) for row in rows] == [0, 0, 2]
    assert "1 of 5 samples left out, as they do not fit" in caplog.text


def test_webvid_masks_and_counts(tmp_path: Path) -> None:
    for number, frames in enumerate((20, 20, 20)):
        write_clip(tmp_path / "videos" / "a" / f"{number}.mp4", frames)
    broken = tmp_path / "videos" / "a" / "1.mp4"
    broken.write_bytes(broken.read_bytes()[:300])
    rows = "".join(f'{n},a,"caption {n}"\n' for n in range(4))
    (tmp_path / "list.csv").write_text("videoid,page_dir,name\n" + rows, encoding="utf-8")
    tables: dict[str, Any] = {"vlm": {"max_images": 4}, "train": {"seq_len": 48}}
    found = rows_of(
        open_source(
            tmp_path / "list.csv", "vlm/webvid", data={"vlm/webvid": {"unreadable": "mask"}}, **tables
        )
    )
    assert [int(row["unreadable_videos"]) for row in found] == [0, 1, 0, 1]
    assert [int(row["missing"]) for row in found] == [0, 0, 0, 1]
    assert [bool((row["targets"] >= 0).any()) for row in found] == [True, False, True, False]
    assert len(brightness(found[0])) == 4


def test_a_row_of_webvid_that_is_short_is_named_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        write_clip(tmp_path / "videos" / "a" / f"{number}.mp4", 20)
    file = tmp_path / "list.csv"
    file.write_text("videoid,page_dir,name\n0,a,zero\n5,a\n6\n1,a,one\n", encoding="utf-8")
    tables: dict[str, Any] = {"vlm": {"max_images": 4}, "train": {"seq_len": 48}}
    with pytest.raises(DataError, match=r"list\.csv:3: there is no column 'name'; there is: videoid,"):
        open_source(file, "vlm/webvid", **tables)
    data = {"vlm/webvid": {"malformed": "drop"}}
    rows = rows_of(open_source(file, "vlm/webvid", data=data, **tables))
    assert answers_of(rows) == ["zero|", "one|"]
    assert [int(row["left_out"]) for row in rows] == [0, 2]

    def refused(path: Path, *args: Any, **more: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(DataError, match=r"list\.csv.*Permission denied"):
        list(read_rows(file, WebVidOptions()))


def test_a_file_that_nobody_may_read_is_named_or_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its length is known, its content is not."""
    write_samples(tmp_path, [{"image": f"{n}.png", "answer": str(n)} for n in range(2)])
    before = Path.open

    def refused(path: Path, *args: Any, **more: Any) -> Any:
        if path.name == "1.png":
            raise PermissionError(13, "Permission denied")
        return before(path, *args, **more)

    monkeypatch.setattr(Path, "open", refused)
    assert len(open_source(tmp_path, "vlm/images", data={"vlm/images": {"unreadable": "mask"}})) == 2


def test_an_image_that_is_too_thin_is_named_or_masked(tmp_path: Path) -> None:
    """Also where its patches are counted before it is read."""
    patches = {"patch_size": 4, "min_pixels": 64, "max_pixels": 256, "dim": 16, "n_heads": 2}
    encoder = {"name": "patches", "patches": patches}
    tables: dict[str, Any] = {
        "vlm": {"max_images": 2, "max_patches": 64, "encoder": encoder, "connector": {"name": "patch_merger"}}
    }
    write_samples(tmp_path, [{"image": f"{n}.png", "prompt": "q", "answer": "a"} for n in range(3)])
    Image.new("RGB", (1, 900)).save(tmp_path / "1.png")
    with pytest.raises(DataError, match=r"data\.jsonl:2: .*900 x 1 pixels: one side is more than 200 times"):
        open_source(tmp_path, "vlm/images", vlm=dict(tables["vlm"]))
    data = {"vlm/images": {"unreadable": "mask"}}
    rows = rows_of(open_source(tmp_path, "vlm/images", vlm=dict(tables["vlm"]), data=data))
    assert [int(row["unreadable"]) for row in rows] == [0, 1, 0]
    assert answers_of(rows) == ["a|", "", "a|"]
