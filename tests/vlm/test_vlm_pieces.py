"""Pictures in pieces against plain loops and numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vlmdatakit import digits, encoded, open_source, rows_of, write_clip
from vlmkit import config_of, write_samples

from forge_core.data.tokenizer import ByteTokenizer
from forge_core.errors import DataError
from forge_core.plugins import Plugins
from forge_vlm.data.layout import Part, compacted, lay_out, parts_in
from forge_vlm.data.pieces import Cutting, Piece, cut, read_pieces
from forge_vlm.data.pixels import prepared
from forge_vlm.geometry import ImageGeometry
from forge_vlm.geometry_split import arrangement, most_pieces, unsplit
from forge_vlm.marks import BYTE_MARKS, encode_marks
from forge_vlm.table import PiecesConfig

GEOMETRY = ImageGeometry(size=8, grid=2, dim=16, resample="lanczos", longest=32, split=True)
MARKS = PiecesConfig(before="<{row},{column}>", after_row="|", after_all="/")


def picture_of(width: int, height: int, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def split_tower(**more: Any) -> dict[str, Any]:
    """A model that sees pictures in 2 x 2 pieces of 8 x 8 pixels and as a whole."""
    tower = {"image_size": 8, "patch_size": 4, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}
    encoder = {"name": "idefics3", "idefics3": {**tower, "longest_edge": 16, "split": True}}
    return {"encoder": encoder, "connector": {"name": "linear"}, **more}


@pytest.mark.parametrize(
    ("size", "pieces"),
    [
        ((32, 32), (4, 4)),
        ((100, 200), (4, 2)),  # 16 x 32
        ((200, 100), (2, 4)),
        ((300, 200), (3, 4)),  # 32 x 21, whose lower side is even: 22, which is 3 pieces
        ((2, 2), (4, 4)),  # small ones are enlarged, too
        ((1000, 3), (1, 4)),  # never less than one piece
    ],
)
def test_how_many_pieces_a_picture_has(size: tuple[int, int], pieces: tuple[int, int]) -> None:
    width, height = size
    assert arrangement(GEOMETRY, height, width) == pieces
    assert prepared(picture_of(*size), GEOMETRY).shape == (3, pieces[0] * 8, pieces[1] * 8)


def test_a_picture_of_one_piece_is_one_image() -> None:
    small = ImageGeometry(size=8, grid=2, dim=16, longest=8, split=True)
    assert arrangement(small, 5, 8) == (0, 0)
    [whole] = cut(prepared(picture_of(8, 5), small), small)
    assert np.array_equal(whole, prepared(picture_of(8, 5), unsplit(small)))
    assert (most_pieces(GEOMETRY), most_pieces(small), most_pieces(unsplit(GEOMETRY))) == (17, 1, 1)


def test_pieces_are_cut_row_by_row_and_the_whole_comes_last() -> None:
    """Each resize by Pillow, one after another."""
    picture = picture_of(300, 200)
    large = picture.resize((32, 22), Image.Resampling.LANCZOS).resize((32, 24), Image.Resampling.LANCZOS)
    boxes = [(8 * c, 8 * r, 8 * c + 8, 8 * r + 8) for r in range(3) for c in range(4)]
    expected = [large.crop(box) for box in boxes] + [large.resize((8, 8), Image.Resampling.LANCZOS)]
    found = cut(prepared(picture, GEOMETRY), GEOMETRY)
    assert len(found) == 13
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, np.asarray(other).transpose(2, 0, 1))


PARTS = [
    Part(ids=(97,)),
    Part(ids=(40,)),
    Part(image=0, joined=True),
    Part(ids=(41,), joined=True),
    Part(image=1),
    Part(ids=(98,), learnt=True),
]
"""a(first)secondb"""


def text_of(parts: list[Part]) -> str:
    return "".join(
        f"[{part.image}]" if part.image is not None else bytes(part.ids).decode() for part in parts
    )


def test_pieces_and_their_marks_stand_where_the_picture_does() -> None:
    found = Cutting(GEOMETRY, MARKS, ByteTokenizer()).expanded(PARTS, [(2, 1), (0, 0)])
    assert text_of(found) == "a<1,1>[0]|<2,1>[1]|/([2])[3]b"
    # one group from the first mark to the last, so that it fits or does not
    groups = [text_of([part]) for part in found if not part.joined]
    assert groups == ["a", "<1,1>", "[3]", "b"]


@pytest.mark.parametrize(
    ("limit", "images", "tokens"),
    [(27, (), 1), (28, (0, 1, 2), 28), (31, (0, 1, 2), 28), (32, (0, 1, 2, 3), 32), (33, (0, 1, 2, 3), 33)],
)
def test_a_picture_fits_with_all_of_its_pieces_or_not_at_all(
    limit: int, images: tuple[int, ...], tokens: int
) -> None:
    """A letter; 5 + 4, 6 + 4 and 2 + 1 + 4 + 1 tokens of a picture; one of a piece; and a letter."""
    found = Cutting(GEOMETRY, MARKS, ByteTokenizer()).expanded(PARTS, [(2, 1), (0, 0)])
    laid = lay_out(parts_in(compacted(found)), places=4, limit=limit, eos_id=256)
    assert (laid.images, len(laid.tokens), laid.cut) == (images, tokens, limit < 33)


def test_a_picture_is_read_once_for_its_pieces_and_must_keep_its_size() -> None:
    reads: list[Any] = []

    def read(pictures: Any) -> list[Any]:
        reads.append(pictures)
        return [prepared(picture_of(300, 200), GEOMETRY)]

    pieces = [Piece("a.png", number, 13) for number in (0, 5, 12)]
    found = read_pieces(read, pieces, GEOMETRY)
    whole = cut(prepared(picture_of(300, 200), GEOMETRY), GEOMETRY)
    assert all(np.array_equal(a, whole[n]) for a, n in zip(found, (0, 5, 12), strict=True))
    assert reads == [["a.png"]]
    assert str(pieces[1]) == "a.png, piece 6 of 12"
    assert str(pieces[2]) == "a.png, whole"
    with pytest.raises(DataError, match=r"a\.png has another size than when the run started"):
        read_pieces(read, [Piece("a.png", 0, 5)], GEOMETRY)
    with pytest.raises(DataError, match=r"a\.png has another size than when the run started"):
        read_pieces(read, ["a.png"], GEOMETRY)


def test_frames_of_a_video_are_never_cut(tmp_path: Path) -> None:
    from forge_vlm.data.picture import Blob
    from forge_vlm.data.video import read_frames

    pytest.importorskip("av")
    write_clip(tmp_path / "a.avi")
    clip = Blob(tmp_path / "a.avi", "a.avi")
    [frame] = read_frames(clip, [0.0], GEOMETRY)
    assert frame.shape == (3, 8, 8)
    assert np.array_equal(frame, read_frames(clip, [0.0], unsplit(GEOMETRY))[0])


def test_samples_of_pieces_are_counted_and_those_that_cannot_be_read_are_masked(tmp_path: Path) -> None:
    """One of 2 x 2 pieces, and one of a broken file, packed."""
    from forge_core.testing import tiny_session

    records = [
        {"image": "large.png", "prompt": "a", "answer": "b"},
        {"image": "broken.png", "prompt": "c", "answer": "d"},
    ]
    folder = write_samples(tmp_path, records)
    picture_of(32, 32).save(folder / "large.png")
    (folder / "broken.png").write_bytes(b"no picture")
    vlm = split_tower(max_images=6, pieces={"before": "#"})
    data = {"vlm/images": {"unreadable": "mask", "pack": True}}
    pytest.importorskip("transformers")
    plugins = Plugins()
    config = config_of(folder, plugins, vlm=vlm, data=data, train={"seq_len": 48, "batch_size": 1})
    with tiny_session(config, plugins) as session:
        source: Any = session.data.train.sources[0]  # type: ignore[attr-defined]
        assert [sorted(row) for row in source.rows] == [[0, 1]]
        row = source[0]
    assert row["present"].tolist() == [True] * 5 + [False]
    # 4 pieces with a mark each, the whole, a, b and the end; then the text of the one that is masked
    assert int(row["valid"].sum()) == 4 * 5 + 4 + 3 + 4 + 3
    assert row["image_places"].tolist() == [1, 6, 11, 16, 20, 0]
    assert int(row["unreadable"]) == 1
    assert int((row["targets"] >= 0).sum()) == 2


def test_digits_are_cut_like_other_pictures() -> None:
    """8 x 8 pixels are enlarged to 16 x 16, though they have the size of a piece already."""
    pytest.importorskip("transformers")
    source = open_source("", "vlm/digits", vlm=split_tower(max_images=5), train={"seq_len": 64})
    row = source[0]
    assert int(row["present"].sum()) == 5
    whole = np.asarray(digits()[0][0].resize((16, 16), Image.Resampling.LANCZOS)).transpose(2, 0, 1)
    assert np.array_equal(row["pixels"][1], whole[:, :8, 8:])


def test_a_picture_of_a_data_set_is_read_once_for_its_pieces_and_counted_once(tmp_path: Path) -> None:
    """A whole picture of 2 x 2 pieces, and one whose end is missing, which is found out by decoding it."""
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("transformers")
    content = encoded(picture_of(64, 64))
    columns = {"image": [content, content[:-40]], "answer": ["a", "b"]}
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "saved"))
    vlm = split_tower(max_images=5)
    data = {"vlm/hf": {"unreadable": "mask"}}
    source = open_source(tmp_path / "saved", "vlm/hf", vlm=vlm, data=data, train={"seq_len": 48})
    read, reads = source.build.read, []

    def counted(pictures: Any) -> Any:
        reads.append([str(each) for each in pictures])
        return read(pictures)

    source.build.read = counted
    rows = rows_of(source)
    assert reads == [["row 0 image"], ["row 1 image"]]
    assert [int(row["present"].sum()) for row in rows] == [5, 0]
    assert [int(row["unreadable"]) for row in rows] == [0, 1]


def test_names_of_special_tokens_are_tokens_of_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert encode_marks(tokenizer, "a<bos>é<global-img>") == (97, 247, 195, 169, 193)
    assert encode_marks(tokenizer, "<row_1_col_1>") == tuple(b"<row_1_col_1>")
    assert len(set(BYTE_MARKS.values())) == len(BYTE_MARKS)
    for token in BYTE_MARKS.values():  # none is a byte of any text
        with pytest.raises(UnicodeDecodeError):
            bytes([token]).decode()
        assert token in (0xC0, 0xC1) or token >= 0xF5
