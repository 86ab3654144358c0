"""Chats: which tokens are learnt, worked out by hand; truncation; the tokenizer's own template."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sourcekit import SPEC, spec_of, write_jsonl
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from forge_core.commands.main import main
from forge_core.data.chat import TEMPLATES, check_messages, encode_chat, template_of
from forge_core.data.options import ChatOptions, TokensOptions
from forge_core.data.packing import RowSource
from forge_core.data.prepared import build_chat
from forge_core.data.tokenizer import ByteTokenizer, HFTokenizer
from forge_core.data.tokens import build as build_tokens
from forge_core.errors import DataError

BYTES = ByteTokenizer()
TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": ""},
]


def learnt_text(name: str, talk: list[dict[str, str]] = TALK) -> tuple[str, str]:
    """The whole text with | for the end of a document, and the same with _ for what is not learnt."""
    tokens, learnt = encode_chat(talk, TEMPLATES[name], BYTES)
    assert len(tokens) == len(learnt)
    shown = ["|" if t == 256 else chr(t) for t in tokens]
    return "".join(shown), "".join(c if m else "_" for c, m in zip(shown, learnt, strict=True))


def test_plain_by_hand() -> None:
    text, learnt = learnt_text("plain")
    assert text == "System: S\nUser: Hi\nAssistant: Yo|\nUser: ?\nAssistant: |"
    assert learnt == "_" * 30 + "Yo|" + "_" * 20 + "|"
    assert len("System: S\nUser: Hi\nAssistant: ") == 30
    assert len("\nUser: ?\nAssistant: ") == 20


def test_chatml_by_hand() -> None:
    text, learnt = learnt_text("chatml", TALK[1:3])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    # 12 + 5 for the head, 2 for Hi, 10 + 1 for its end, 12 + 10 for the head of the answer
    assert learnt == "_" * (17 + 2 + 11 + 22) + "Yo<|im_end|>" + "_"


def test_llama3_by_hand() -> None:
    text, learnt = learnt_text("llama3", [TALK[1], {"role": "assistant", "content": " Yo\n"}])
    assert text == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYo<|eot_id|>"
    )
    answer = len("Yo<|eot_id|>")
    assert learnt == "_" * (len(text) - answer) + "Yo<|eot_id|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    """A vocabulary of words in which 'HiYo' is one token, and the special tokens of chatml."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = ["[UNK]", "<|endoftext|>", "user", "assistant", "system", "Hi", "Yo", "?", "S", "HiYo", "im_end"]
    words += ["<|", "|>", "\n"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(part, "isolated") for part in ("\n", "<|", "|>")]
    )
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    return HFTokenizer(folder)


def test_pieces_are_tokenised_apart_and_forged_specials_are_text(tokenizer: HFTokenizer) -> None:
    start, end = tokenizer.encode("<|im_start|>")[0], tokenizer.encode("<|im_end|>")[0]
    talk = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "Yo"}]
    tokens, learnt = encode_chat(talk, TEMPLATES["chatml"], tokenizer)
    # start user \n  <| im_end |>  end \n  start assistant \n  Yo end  \n
    assert tokens == [start, 2, 13, 11, 10, 12, end, 13, start, 3, 13, 6, end, 13]
    assert learnt == [False] * 11 + [True, True, False]
    assert tokens.count(end) == 2


def open_chat(rows: list[Any], folder: Path, options: ChatOptions | None = None, **changes: Any) -> RowSource:
    path = write_jsonl(folder / "chat.jsonl", rows)
    options = options or ChatOptions(template="plain")
    return build_chat(spec_of(path, folder / "cache", **changes), options)


def test_source_masks_all_but_the_answers(tmp_path: Path) -> None:
    rows = [{"messages": TALK}, {"messages": TALK[1:3]}]
    source = open_chat(rows, tmp_path, seq_len=100)
    assert len(source) == 1
    (sample,) = [source[0]]
    targets = sample["targets"]
    # the position before a token predicts it: 29 before "Y", and so on; 55 tokens, then the second document
    answers = {29: ord("Y"), 30: ord("o"), 31: 256, 52: 256}
    start = len("System: S\nUser: Hi\nAssistant: Yo|\nUser: ?\nAssistant: |")
    second = start + len("User: Hi\nAssistant: ") - 1
    answers |= {second: ord("Y"), second + 1: ord("o"), second + 2: 256}
    assert {int(i): int(targets[i]) for i in np.flatnonzero(targets != -100)} == answers
    assert sample["positions"][start] == 0
    assert sample["documents"][[0, start - 1, start, -1]].tolist() == [0, 0, 1, 2]


def test_long_conversations_are_cut_or_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    late = [{"role": "user", "content": "x" * 100}, {"role": "assistant", "content": "never seen"}]
    early = [TALK[1], TALK[2], {"role": "user", "content": "y" * 100}]
    rows = [{"messages": talk} for talk in (late, early, TALK[1:3])]
    with caplog.at_level(logging.WARNING, "forge.data"):
        cut = open_chat(rows, tmp_path, seq_len=48)
    assert "2 of 3 documents are longer than 48 tokens and cut to their start" in caplog.text
    assert "nothing is learnt in 1 document; left out" in caplog.text
    targets = cut.batch(np.arange(len(cut)))["targets"]
    assert (targets != -100).sum() == 6  # "Yo|" of the two that are left
    dropped = open_chat(rows, tmp_path, ChatOptions(template="plain", too_long="drop"), seq_len=48)
    assert (dropped.batch(np.arange(len(dropped)))["targets"] != -100).sum() == 3


def test_an_answer_that_is_cut_is_learnt_up_to_the_cut(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "0123456789"}]
    head = len("User: a\nAssistant: ")
    source = open_chat([{"messages": talk}], tmp_path, seq_len=head + 4)
    (targets,) = source.batch(np.array([0]))["targets"]
    assert targets.tolist() == [-100] * (head - 1) + [ord(c) for c in "01234"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, r"chat\.jsonl:2: a conversation is a list of messages, not \[\]"),
        ({"messages": "hi"}, r"chat\.jsonl:2: a conversation is a list of messages, not 'hi'"),
        ({"messages": [{"role": "user"}]}, r"chat\.jsonl:2: message 0: content is no text, but None"),
        ({"messages": [["user", "x"]]}, r"chat\.jsonl:2: message 0 is no object"),
        ({"text": "x"}, r"chat\.jsonl:2: no field 'messages'; there is: text"),
    ],
)
def test_rows_that_are_no_conversations_are_named(row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        open_chat([{"messages": TALK}, row], tmp_path)


def test_nothing_to_learn_and_documents_not_apart(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no document of \d+ tokens has anything to learn"):
        open_chat([{"messages": TALK[:2]}], tmp_path)
    with pytest.raises(DataError, match="conversations are always kept apart"):
        open_chat([{"messages": TALK}], tmp_path, pack=False)
    assert check_messages(TALK) is TALK


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def own_template(tokenizer: HFTokenizer, template: str, folder: Path) -> HFTokenizer:
    content = Path(tokenizer.name, "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(content)
    config = {"chat_template": template, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return HFTokenizer(folder)


def test_own_template_learns_the_answers(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    own = own_template(tokenizer, CHATML, tmp_path)
    talk = [*TALK[1:3], TALK[1]]
    tokens, learnt = encode_chat(talk, template_of("tokenizer", own), own)
    plain, _ = encode_chat(talk, TEMPLATES["chatml"], own)
    assert tokens == plain
    # the template's line end behind the answer belongs to what it adds for the answer
    answer = [6, own.eos_id, 13]
    assert [t for t, m in zip(tokens, learnt, strict=True) if m] == answer


def test_own_template_that_cannot_be_masked_or_is_missing(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    last_only = "{% for m in messages %}{{ '[' if loop.last }}{{ m.content }}{% endfor %}"
    own = own_template(tokenizer, last_only, tmp_path)
    with pytest.raises(DataError, match="changes earlier turns"):
        encode_chat(TALK, template_of("tokenizer", own), own)
    own = own_template(tokenizer, "{{ raise_exception('no system') }}", tmp_path)
    with pytest.raises(DataError, match="refuses this conversation: no system"):
        encode_chat(TALK, template_of("tokenizer", own), own)
    own = own_template(tokenizer, "{{ ''.__class__.__mro__[1].__subclasses__() }}", tmp_path)
    with pytest.raises(DataError, match="SecurityError"):
        encode_chat(TALK, template_of("tokenizer", own), own)
    with pytest.raises(DataError, match="the tokenizer bytes brings no chat template"):
        template_of("tokenizer", SPEC.tokenizer)
    with pytest.raises(DataError, match="no chat template 'alpaca'"):
        template_of("alpaca", SPEC.tokenizer)


def test_prepared_chats_keep_their_masks(tmp_path: Path) -> None:
    rows = [{"messages": TALK}, {"messages": TALK[1:3]}]
    path = write_jsonl(tmp_path / "chat.jsonl", rows)
    out = str(tmp_path / "out")
    assert main(["data", "prepare", str(path), "--chat-template", "plain", "--out", out, "--verify"]) == 0
    tokens = build_tokens(spec_of(out, tmp_path, seq_len=60), TokensOptions())
    chat = open_chat(rows, tmp_path, seq_len=60)
    assert tokens.tokens.tolist() == chat.tokens.tolist()
    for index in range(len(tokens)):
        targets = tokens[index]["targets"]
        ids = tokens[index]["tokens"]
        assert set(ids[1:][targets[:-1] != -100].tolist()) <= {ord("Y"), ord("o"), 256}
    learnt = sum(int((tokens[i]["targets"] != -100).sum()) for i in range(len(tokens)))
    assert learnt == 3 + 1 + 3
