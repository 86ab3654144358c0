"""Text of samples in its forms, what is learnt of it, and what does not go together."""

from __future__ import annotations

import logging
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from vlmdatakit import answers_of, open_source, rows_of, write_tar
from vlmkit import TOKENS, tables, write_samples

from forge_core.contract import Component
from forge_core.errors import DataError, ForgeError
from forge_core.loss import cross_entropy_from_logits
from forge_core.plugins import Plugins
from forge_core.testing import isolated_plugins, plugin_object, run_tiny, tiny_config
from forge_vlm.data.layout import Part, compacted, parts_in
from forge_vlm.data.record import normalised

Record = dict[str, Any]


def opened(folder: Path, records: list[Record], train: dict[str, Any] | None = None, **options: Any) -> Any:
    write_samples(folder, records)
    return open_source(folder, "vlm/images", data={"vlm/images": options}, train=train or {})


def text_of(row: dict[str, Any]) -> str:
    """The tokens of a row as text; # where an image stands, | for the end."""
    count = int(row["valid"].sum())
    found = []
    for token, index in zip(row["tokens"][:count].tolist(), row["image_index"][:count].tolist(), strict=True):
        found.append("#" if index >= 0 else "|" if token == 256 else chr(token))
    return "".join(found).replace("#" * TOKENS, "[#]")


ROLES = [{"role": "user", "content": "<image>is <image>?"}, {"role": "assistant", "content": "b"}]
PARTS = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "is "}, {"type": "image"}, "?"]},
    {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
]
LLAVA = [{"from": "human", "value": "<image>is <image>?"}, {"from": "gpt", "value": "b"}]
FORMS: dict[str, Record] = {
    "prompt and answer": {"prompt": "<image>is <image>?", "answer": "b"},
    "caption": {"prompt": "<image>is <image>?", "caption": "b"},
    "messages": {"messages": ROLES},
    "parts": {"messages": PARTS},
    "conversations": {"conversations": LLAVA},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("template", "expected"),
    [("none", "[#]is [#]?b|"), ("plain", "User: [#]is [#]?\nAssistant: b|")],
)
def test_all_forms_are_one_sample(tmp_path: Path, form: str, template: str, expected: str) -> None:
    record = {"images": ["0.png", "1.png"], **FORMS[form]}
    row = rows_of(opened(tmp_path, [record], {"seq_len": 48}, template=template))[0]
    assert text_of(row) == expected
    assert answers_of([row]) == ["b|"]
    assert row["present"].tolist() == [True, True]


def test_every_answer_of_a_conversation_is_learnt_with_its_end(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "<image>a?"},
        {"from": "gpt", "value": "b"},
        {"from": "human", "value": "c?"},
        {"from": "gpt", "value": "d"},
    ]
    row = rows_of(opened(tmp_path, [{"image": "0.png", "conversations": turns}]))[0]
    assert text_of(row) == "[#]a?b|c?d|"
    assert answers_of([row]) == ["b|d|"]
    predicts = [k for k, target in enumerate(row["targets"].tolist()) if target >= 0]
    assert predicts == [5, 6, 9, 10]  # "?" predicts "b", and "b" its end; behind 4 places of the image


def test_special_tokens_in_what_somebody_wrote_are_text(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "<|im_end|>?"}, {"from": "gpt", "value": "<|im_end|>"}]
    row = rows_of(opened(tmp_path, [{"conversations": turns}], {"seq_len": 99}, template="chatml"))[0]
    assert answers_of([row]) == ["<|im_end|><|im_end|>"]


def test_a_question_for_samples_without_one(tmp_path: Path) -> None:
    records: list[Record] = [{"image": "0.png", "answer": "a"}, {"prompt": "", "answer": "b"}]
    found = rows_of(opened(tmp_path, records, question="What? "))
    assert [text_of(row) for row in found] == ["[#]What? a|", "b|"]


def test_a_sample_without_an_image_in_a_batch_with_images(tmp_path: Path) -> None:
    """It has its loss, and the images of others do not change it."""
    from forge_core.testing import tiny_session

    write_samples(tmp_path, [{"image": "0.png", "answer": "a"}, {"prompt": "x", "answer": "bc"}])
    plugins = Plugins()
    with tiny_session(tiny_config(plugins=plugins, **tables(tmp_path)), plugins) as session:
        source: Any = session.data.train.sources[0]  # type: ignore[attr-defined]
        rows = [source[0], source[1]]
        batch = {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
        alone = {name: value[1:] for name, value in batch.items()}
        session.model.eval()
        both = session.forward(session.model, batch).token_loss[1]
        torch.testing.assert_close(both, session.forward(session.model, alone).token_loss[0])
        changed = {**batch, "pixels": 255 - batch["pixels"], "tokens": batch["tokens"].clone()}
        changed["tokens"][0, -1:] = changed["tokens"][0, :1] = 7
        torch.testing.assert_close(both, session.forward(session.model, changed).token_loss[1])


def test_a_loss_is_the_mean_over_supervised_tokens() -> None:
    """Of two rows the first has no label; the second two targets of losses ln 2 and ln 4."""
    ln3 = 1.0986122886681098
    logits = torch.zeros(2, 3, 2, dtype=torch.float64)
    logits[1, 1, 1] = ln3
    targets = torch.tensor([[-100, -100, -100], [0, 0, -100]])
    loss_sum, _ = cross_entropy_from_logits(logits, targets, 0.0)
    assert float(loss_sum) / int((targets >= 0).sum()) == pytest.approx(1.039721, abs=1e-6)


# What is wrong, or does not fit.

BAD: dict[str, tuple[Record, str]] = {
    "more placeholders": (
        {"id": "cat", "image": "0.png", "prompt": "<image><image><image>", "answer": "a"},
        r"data\.jsonl:1: cat: 3 placeholders <image> for 1 image",
    ),
    "fewer placeholders": (
        {"images": ["0.png", "1.png"], "prompt": "<image>", "answer": "a"},
        r"data\.jsonl:1: 1 placeholder <image> for 2 images",
    ),
    "a missing image": (
        {"id": "cat", "image": "9.png", "answer": "a"},
        r"1 image is not there: .*9\.png of .*data\.jsonl:1: cat",
    ),
    "no text": ({"image": "0.png"}, r"data\.jsonl:1: neither messages nor the text of an answer"),
    "turns": ({"conversations": "hello"}, r"data\.jsonl:1: conversations is str, no list of messages"),
    "a turn": (
        {"conversations": [{"from": "gpt"}]},
        r"data\.jsonl:1: message 0: content is no text, but None",
    ),
    "a part": (
        {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
        r"data\.jsonl:1: message 0: .*audio.* is neither text nor an image nor a video",
    ),
    "an image": ({"image": 3, "answer": "a"}, r"data\.jsonl:1: image is no path"),
    "too many images": (
        {"images": ["0.png"] * 3, "answer": "a"},
        r"data\.jsonl:1: has 3 images, more than vlm\.max_images = 2",
    ),
    "a video that is not there": (
        {"id": "cat", "image": "0.png", "prompt": "<image><video>", "answer": "a"},
        r"data\.jsonl:1: cat: 1 placeholder <video> for 0 videos",
    ),
    "a part of a video that is not there": (
        {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
        r"data\.jsonl:1: 1 placeholder <video> for 0 videos",
    ),
    "a part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        r"data\.jsonl:1: message 0: .*text.* is neither text nor an image nor a video",
    ),
}


@pytest.mark.parametrize("how", BAD)
def test_a_wrong_sample_is_named(tmp_path: Path, how: str) -> None:
    record, message = BAD[how]
    with pytest.raises(DataError, match=message):
        opened(tmp_path, [record])


@pytest.mark.parametrize(
    ("record", "way"),
    [
        ({"image": "0.png", "reply": "a"}, "give it answer or caption"),
        ({"image": "0.png", "answer": 5}, "answer is to be text in quotes, not 5"),
        ({"image": "0.png", "prompt": ["a"], "answer": "a"}, r"prompt is to be text in quotes, not \["),
    ],
)
def test_a_sample_without_a_text_says_the_way_out(tmp_path: Path, record: Record, way: str) -> None:
    with pytest.raises(DataError) as caught:
        opened(tmp_path, [record])
    assert re.match(way, caught.value.hint)
    assert 'malformed = "drop"' in caught.value.hint


def test_no_JSON_and_no_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"answer": "a"}\n{"answer": \n', encoding="utf-8")
    with pytest.raises(DataError, match=r"data\.jsonl:2: not JSON"):
        open_source(tmp_path, "vlm/images")
    with pytest.raises(DataError, match=r"there is no file .*none"):
        open_source(tmp_path / "none", "vlm/images")


def test_a_broken_picture_is_named_or_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from PIL import Image

    records = [{"id": f"s{n}", "image": f"{n}.jpg", "answer": "a"} for n in range(3)]
    write_samples(tmp_path, records)
    for number in range(3):
        Image.new("RGB", (64, 64), (200, 10 * number, 0)).save(tmp_path / f"{number}.jpg")
    (tmp_path / "1.jpg").write_bytes((tmp_path / "1.jpg").read_bytes()[:-300])
    with pytest.raises(DataError, match=r"data\.jsonl:2: s1: cannot read the image .*1\.jpg"):
        rows_of(open_source(tmp_path, "vlm/images"))
    (tmp_path / "2.jpg").unlink()
    found = rows_of(open_source(tmp_path, "vlm/images", data={"vlm/images": {"unreadable": "mask"}}))
    assert [int(row["unreadable"]) for row in found] == [0, 1, 1]
    assert answers_of(found) == ["a|", "", ""]
    assert "s1 is masked: cannot read the image" in caplog.text
    assert "s2 is masked: there is no image" in caplog.text


@pytest.mark.parametrize("policy", ["cut", "drop", "error"])
def test_what_is_too_long_is_told_and_never_part_of_an_image(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten tokens: an image behind seven does not fit, and neither does the third of three."""
    records: list[Record] = [
        {"id": "fits", "image": "0.png", "prompt": "q", "answer": "a"},
        {"id": "late", "image": "0.png", "prompt": "qqqqqqq<image>", "answer": "abc"},
        {"id": "second", "images": ["0.png", "1.png"], "prompt": "<image>qqq<image>", "answer": "abc"},
        {"id": "answer", "image": "0.png", "prompt": "q", "answer": "abcdefgh"},
    ]
    write_samples(tmp_path, records)
    data, train = {"vlm/images": {"too_long": policy}}, {"seq_len": 10}
    if policy == "error":
        with pytest.raises(DataError, match=r"late: does not fit train\.seq_len = 10"):
            open_source(tmp_path, "vlm/images", data=data, train=train)
        return
    with caplog.at_level(logging.WARNING):
        found = rows_of(open_source(tmp_path, "vlm/images", data=data, train=train))
    if policy == "drop":
        assert [text_of(row) for row in found] == ["[#]qa|"]
        assert "3 of 4 samples left out" in caplog.text
        return
    assert [text_of(row) for row in found] == ["[#]qa|", "qqqqqqq", "[#]qqq", "[#]qabcd|"]
    assert answers_of(found) == ["a|", "", "", "abcd|"]
    assert [int(row["present"].sum()) for row in found] == [1, 0, 1, 1]
    assert "3 of 4 samples cut, as they do not fit train.seq_len = 10 (late, second, answer)" in caplog.text
    assert "2 of 4 samples without a label" in caplog.text


def test_a_data_set_of_which_nothing_is_supervised_ends_the_run(tmp_path: Path) -> None:
    """Ten samples whose answers are cut off by their prompts: the mask is everything."""
    records = [{"id": f"s{n}", "image": "0.png", "prompt": "q" * 40, "answer": "a"} for n in range(10)]
    plugins = Plugins()
    write_samples(tmp_path, records)
    config = tiny_config(plugins=plugins, **tables(tmp_path, train={"max_steps": 9, "batch_size": 1}))
    with pytest.raises(DataError, match="no supervised tokens in the first 5 updates: nothing is learnt"):
        run_tiny(config, plugins)


def test_messages_win_over_a_prompt_and_a_text_of_parts_is_joined() -> None:
    record = normalised({"messages": PARTS, "prompt": "x", "answer": "y"}, "<i>")
    assert record == {
        "messages": [{"role": "user", "content": "<i>is <i>?"}, {"role": "assistant", "content": "b"}]
    }
    assert normalised({"caption": "c"}, "<i>", "q") == {"prompt": "q", "answer": "c"}


def test_parts_are_kept_in_few_bytes() -> None:
    parts = [Part(ids=(5, 1 << 29)), Part(image=0), Part(ids=(7,), learnt=True), Part(), Part(image=1)]
    content = compacted(parts)
    assert parts_in(content) == parts
    assert len(content) == 4 * (3 + 5)


def test_memory_of_many_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of samples of 200 tokens about two kilobytes each stay."""
    monkeypatch.setattr("forge_vlm.data.source._KEPT", 0)
    records = [{"image": "0.png", "prompt": "q" * 150, "answer": f"{n:050}"} for n in range(800)]
    write_samples(tmp_path, records)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    source = open_source(tmp_path, "vlm/images", train={"seq_len": 256})
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(source) == 800
    assert used < 800 * 3000


class Lying(torch.nn.Module):
    """An encoder that gives one token more than its options say."""

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, options.dim)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(pixels.flatten(2).transpose(1, 2)[:, : TOKENS + 1])
        return found


def test_an_encoder_whose_tokens_do_not_fit_is_refused(tmp_path: Path) -> None:
    import forge_vlm.plugin

    part = Component(
        category="vlm_encoder",
        name="lying",
        target="test_vlm_data_text:Lying",
        options="forge_vlm.options:VitOptions",
    )
    mine = plugin_object(forge_components=lambda: [part])
    plugins = isolated_plugins({"vlm": forge_vlm.plugin, "mine": mine})
    sizes = {"image_size": 8, "patch_size": 4, "dim": 16, "n_heads": 2}
    write_samples(tmp_path, [{"image": "0.png", "answer": "a"}] * 4)
    found = tables(tmp_path, mine={}, vlm={"encoder": {"name": "mine/lying", "mine/lying": sizes}})
    config = tiny_config(plugins=plugins, **found)
    message = r"the encoder mine/lying gives \(5, 16\) for an image, and \(4, 16\) is expected"
    with pytest.raises(ForgeError, match=message):
        run_tiny(config, plugins)


def test_a_broken_picture_is_named_with_its_line(tmp_path: Path) -> None:
    """Also where several samples have one name."""
    records = [
        {"image": "0.png", "prompt": "a? ", "answer": "a"},
        {"id": "twice", "image": "1.png", "prompt": "b? ", "answer": "b"},
        {"id": "twice", "image": "2.png", "prompt": "c? ", "answer": "c"},
        {"image": "3.png", "prompt": "d? ", "answer": "d"},
    ]
    write_samples(tmp_path, records)
    for name in ("2.png", "3.png"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:40])
    source = open_source(tmp_path, "vlm/images")
    for number, place in ((2, r"data\.jsonl:3: twice: cannot read"), (3, r"data\.jsonl:4: cannot read")):
        with pytest.raises(DataError, match=place) as error:
            source[number]
        assert 'unreadable = "mask"' in error.value.hint


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    write_samples(tmp_path, [])
    tar = write_tar(tmp_path / "shard.tar", [("a.png", (tmp_path / "0.png").read_bytes()), ("a.txt", b"a")])
    with pytest.raises(DataError, match=r"shard\.tar is no text, but a JSONL file") as error:
        open_source(tar, "vlm/images")
    assert "vlm/webdataset" in error.value.hint
    with pytest.raises(DataError, match=r"0\.png is no text, but a JSONL file") as error:
        open_source(tmp_path / "0.png", "vlm/images")
    assert "webdataset" not in error.value.hint


def test_samples_without_any_picture_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = {"prompt": "1+1=", "answer": "2"}
    write_samples(tmp_path, [text, {"picture": "0.png", **text}])
    open_source(tmp_path, "vlm/images")
    assert caplog.text.count("no picture in") == 1
    caplog.clear()
    write_samples(tmp_path, [text, {"image": "0.png", **text}])
    open_source(tmp_path, "vlm/images")
    assert "no picture" not in caplog.text


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_pictures_that_packing_leaves_alone_are_told(
    tmp_path: Path, packing: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_samples(tmp_path, [{"image": f"{n}.png", "answer": "a"} for n in range(4)])
    data = {"vlm/images": {"pack": True}, "packing": packing}
    assert len(open_source(tmp_path, "vlm/images", data=data, vlm={"max_images": 1})) == 4
    assert caplog.text.count("raise vlm.max_images") == 1
    caplog.clear()
    assert len(open_source(tmp_path, "vlm/images", data=data, vlm={"max_images": 2})) == 2
    assert "raise vlm.max_images" not in caplog.text


OWN = {"id": "a", "url": "u", "licence": "by", "source": "web", "image_id": 7, "split": "train", "width": 8}
ODD: dict[str, tuple[Record, str]] = {
    "images": ({"imges": ["0.png"], "prompt": "q", "answer": "a"}, "'imges', which .* mean 'images'"),
    "of another case": ({"Image": "0.png", "answer": "a"}, "'Image', which .* mean 'image'"),
    "a video": ({"vidoe": "0.mp4", "prompt": "q", "answer": "a"}, "'vidoe', which .* mean 'video'"),
    "choices": ({"image": "0.png", "answer": "a", "choises": ["a", "b"]}, "'choises', .* mean 'choices'"),
    "a prompt": ({"image": "0.png", "promt": "q", "answer": "a"}, "'promt', which .* mean 'prompt'"),
}


@pytest.mark.parametrize("how", ODD)
def test_a_key_that_is_misspelt_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Also by a start that lays nothing out."""
    monkeypatch.setattr("forge_vlm.data.build.SMALL", 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    odd, told = ODD[how]
    right: Record = {"image": "0.png", "prompt": "q", "answer": "a", **OWN}
    write_samples(tmp_path, [right, {**odd, "id": "b"}, right, {**odd, "id": "c"}])
    for _ in range(2):
        caplog.clear()
        open_source(tmp_path, "vlm/images")
        (line,) = [each for each in caplog.messages if "which is not read" in each]
        assert re.search(rf"2 of 4 samples have the key {told}\? \(b, c\)", line)


def test_keys_of_somebodys_own_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those that are near what the sample has, too; of very many keys not each is compared."""
    near = {"captions": ["x"], "message": "m", "answer_": "b", "image_": "x", "prompts": "p"}
    many = {f"key{n}": n for n in range(2000)}
    write_samples(tmp_path, [{"image": "0.png", "prompt": "q", "answer": "a", **OWN, **near, **many}])
    assert len(open_source(tmp_path, "vlm/images")) == 1
    assert "which is not read" not in caplog.text
