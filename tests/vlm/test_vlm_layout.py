"""What a sample becomes: places of images, what is supervised, and what is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vlmkit import TOKENS, config_of, mixed_records, write_samples

from forge_core.data.tokenizer import ByteTokenizer
from forge_core.errors import DataError
from forge_core.loss import IGNORE, next_token_targets
from forge_core.plugins import Plugins
from forge_core.testing import tiny_session
from forge_vlm.data.layout import Part, lay_out, parts_of, pieces_of

EOS = 2


def text(*ids: int, learnt: bool = False) -> Part:
    return Part(ids=ids, learnt=learnt)


def picture(number: int = 0) -> Part:
    return Part(image=number)


def lay(*parts: Part, limit: int, places: int = 4) -> Any:
    return lay_out(parts, places=places, limit=limit, eos_id=EOS)


def test_text_behind_an_image_is_cut() -> None:
    laid = lay(picture(), text(3, 4, 5, 6, 7), limit=6)
    assert laid.index.tolist() == [0, 1, 2, 3, -1, -1]
    assert laid.tokens[4:].tolist() == [3, 4]
    assert laid.images == (0,)
    assert laid.cut


def test_an_image_that_does_not_fit_is_wholly_gone() -> None:
    laid = lay(text(3, 4, 5, 6, 7), picture(), limit=6)
    assert laid.tokens.tolist() == [3, 4, 5, 6, 7]
    assert laid.index.tolist() == [-1] * 5
    assert (laid.images, laid.dropped, laid.cut) == ((), 1, True)


def test_the_second_of_two_images_is_wholly_gone() -> None:
    laid = lay(picture(0), text(3), picture(1), limit=6)
    assert laid.index.tolist() == [0, 1, 2, 3, -1]
    assert (laid.images, laid.dropped) == ((0,), 1)


@pytest.mark.parametrize(
    ("answer", "limit", "expected"), [((5, 6), 3, (5, 6, 2)), ((5, 6), 2, (5, 2)), ((5,), 2, (5, 2))]
)
def test_an_answer_that_is_cut_still_ends(
    answer: tuple[int, ...], limit: int, expected: tuple[int, ...]
) -> None:
    laid = lay(text(*answer, learnt=True), text(EOS, learnt=True), limit=limit)
    assert laid.tokens.tolist() == list(expected)
    assert all(laid.learnt)


def test_nothing_is_learnt_from_an_answer_with_no_room() -> None:
    laid = lay(text(3, 4), text(5, 6, learnt=True), text(EOS, learnt=True), limit=3)
    assert laid.tokens.tolist() == [3, 4, 5]
    assert not any(laid.learnt)


def test_only_the_answer_and_its_end_are_supervised() -> None:
    """Start 1, an image of 4 tokens, prompt 3 4, answer 5 6, end 2: the positions of 4, 5 and 6 predict."""
    parts = (text(1), picture(), text(3, 4), text(5, 6, learnt=True), text(EOS, learnt=True))
    laid = lay(*parts, limit=10)
    labels = np.where(laid.learnt, laid.tokens, IGNORE)
    targets = next_token_targets(labels)
    assert np.flatnonzero(targets != IGNORE).tolist() == [6, 7, 8]
    assert targets[targets != IGNORE].tolist() == [5, 6, 2]


def test_the_last_visual_token_predicts_the_first_of_a_caption() -> None:
    laid = lay(picture(), text(5, 6, learnt=True), limit=10)
    targets = next_token_targets(np.where(laid.learnt, laid.tokens, IGNORE))
    assert targets.tolist() == [IGNORE, IGNORE, IGNORE, 5, 6, IGNORE]


def test_placeholders_and_images_must_be_as_many() -> None:
    pieces = pieces_of({"prompt": "<image><image><image>?", "answer": "a"}, None)
    with pytest.raises(DataError, match="3 placeholders <image> for 1 image"):
        parts_of(pieces, 1, ByteTokenizer(), "<image>")


def test_images_stand_first_without_placeholders_and_inline_with_them() -> None:
    tokenizer = ByteTokenizer()
    first = parts_of(pieces_of({"prompt": "ab", "answer": "c"}, None), 2, tokenizer, "<image>")
    assert [part.image for part in first] == [0, 1, None, None, None]
    inline = parts_of(pieces_of({"prompt": "a<image>b", "answer": "c"}, None), 1, tokenizer, "<image>")
    assert [part.image for part in inline] == [None, 0, None, None, None]


def rows(folder: Path, **more: dict[str, Any]) -> list[dict[str, Any]]:
    plugins = Plugins()
    config = config_of(folder, plugins, **more)
    with tiny_session(config, plugins) as session:
        source = session.data.train.sources[0]  # type: ignore[attr-defined]
        return [dict(source[number]) for number in range(len(source))]


def test_rows_hold_pixels_places_and_targets(tmp_path: Path) -> None:
    found = rows(write_samples(tmp_path, mixed_records(4)))
    two = found[2]  # a<image> b2<image>? then a3 and the end
    assert two["present"].tolist() == [True, True]
    assert two["image_places"].tolist() == [1, 1 + TOKENS + 3]
    assert two["image_index"][:13].tolist() == [-1, 0, 1, 2, 3, -1, -1, -1, 4, 5, 6, 7, -1]
    assert two["targets"][two["targets"] != IGNORE].tolist() == [*b"a3", 256]
    assert not found[1]["present"].any()
    assert (found[1]["image_index"] == -1).all()


def test_packed_rows_keep_samples_apart(tmp_path: Path) -> None:
    folder = write_samples(tmp_path, mixed_records(8))
    apart = rows(folder)
    packed = rows(folder, data={"vlm/images": {"pack": True}}, train={"seq_len": 64}, vlm={"max_images": 4})
    assert len(packed) < len(apart)
    supervised = sum((row["targets"] != IGNORE).sum() for row in apart)
    assert sum((row["targets"] != IGNORE).sum() for row in packed) == supervised
    for row in packed:
        starts = np.flatnonzero(np.diff(row["documents"], prepend=-1))
        assert (row["positions"][starts] == 0).all()


def test_a_missing_image_is_named(tmp_path: Path) -> None:
    folder = write_samples(tmp_path, [{"id": "cat 1", "image": "none.png", "answer": "a"}])
    with pytest.raises(DataError, match=r"1 image is not there: .*none\.png of .*data\.jsonl:1: cat 1"):
        rows(folder)


def test_a_broken_image_is_an_error_or_masked_and_counted(tmp_path: Path) -> None:
    folder = write_samples(tmp_path, [{"id": f"s{n}", "image": f"{n}.png", "answer": "a"} for n in range(4)])
    (folder / "2.png").write_bytes((folder / "2.png").read_bytes()[:60])
    with pytest.raises(DataError, match=r"s2: cannot read the image .*2\.png"):
        rows(folder)
    found = rows(folder, data={"vlm/images": {"unreadable": "mask"}})
    assert [int(row["unreadable"]) for row in found] == [0, 0, 1, 0]
    assert (found[2]["targets"] == IGNORE).all()
    assert not found[2]["present"].any()


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    folder = write_samples(tmp_path, [{"answer": "a"}, {"image": "0.png", "prompt": "b"}])
    with pytest.raises(DataError, match=r"data\.jsonl:2: neither messages nor the text of an answer"):
        rows(folder)


def test_too_many_images_are_an_error(tmp_path: Path) -> None:
    folder = write_samples(tmp_path, [{"images": ["0.png", "1.png", "2.png"], "answer": "a"}])
    with pytest.raises(DataError, match=r"3 images, more than vlm\.max_images = 2"):
        rows(folder)


def test_logits_on_the_next_token_have_no_loss_and_those_on_others_do() -> None:
    from forge_core.loss import cross_entropy_from_logits

    parts = (text(1), picture(), text(3, 4), text(5, 6, learnt=True), text(EOS, learnt=True))
    laid = lay(*parts, limit=10)
    tokens = torch.tensor([[*laid.tokens, 0, 0]])
    targets = torch.tensor(next_token_targets(np.where(laid.learnt, laid.tokens, IGNORE)))[None]

    def loss(ahead: int) -> float:
        wanted = tokens[:, ahead : ahead + 10]
        logits = 20.0 * torch.nn.functional.one_hot(wanted, 10).double()
        return float(cross_entropy_from_logits(logits, targets, 0.0)[0]) / 3

    assert loss(1) < 1e-6
    assert loss(0) > 15
    assert loss(2) > 15
