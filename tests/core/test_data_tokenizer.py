"""Bytes and tokenizer.json: round trips, sizes without the package, clear refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_core.data.tokenizer import ByteTokenizer, HFTokenizer, load_tokenizer, vocab_size_of
from forge_core.errors import ConfigError, ForgeError

TEXT = "def f(x):\n    return x  # naïve – 語\n"


def train_bpe(path: Path, special: list[str]) -> Any:
    """A byte-level BPE tokenizer trained on a few lines and saved to `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT * 3, "class A:\n    pass\n" * 5], trainer)
    tokenizer.save(str(path))
    return tokenizer


def test_bytes_round_trip_and_end_of_document() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("Aé") == [65, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    first, second = tokenizer.encode_documents([b"ab", bytes(range(256))])
    assert first.tolist() == [97, 98, 256]
    assert first.dtype == np.uint16
    assert second.tolist() == [*range(256), 256]


def test_bytes_that_are_no_text_decode_to_replacement_characters() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([65, 0xFF, 66]) == "A\ufffdB"
    assert tokenizer.decode([0xC3]) == "\ufffd"  # half a character
    assert tokenizer.decode(np.array([65, 256, 66])) == "AB"


def test_tokenizer_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    reference = train_bpe(path, ["<|endoftext|>"])
    tokenizer = load_tokenizer(str(path))
    assert isinstance(tokenizer, HFTokenizer)
    assert tokenizer.encode(TEXT) == reference.encode(TEXT).ids
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.vocab_size == vocab_size_of(str(path)) == reference.get_vocab_size()
    assert tokenizer.eos_id == reference.token_to_id("<|endoftext|>")
    documents = list(tokenizer.encode_documents([TEXT.encode(), b"", b"\xff pass"] * 200))
    assert len(documents) == 600
    assert documents[0].tolist() == [*reference.encode(TEXT).ids, tokenizer.eos_id]
    assert documents[1].tolist() == [tokenizer.eos_id]
    assert documents[2].dtype == np.uint16


def test_a_folder_stands_for_its_tokenizer_json(tmp_path: Path) -> None:
    train_bpe(tmp_path / "tokenizer.json", ["</s>"])
    assert load_tokenizer(str(tmp_path)).vocab_size == vocab_size_of(str(tmp_path))


def test_which_token_ends_a_document(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    train_bpe(path, ["<pad>", "</s>", "<stop>", "<other>"])
    assert HFTokenizer(path).eos_id == 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    assert HFTokenizer(path).eos_id == 2
    assert HFTokenizer(path, eos_token="<other>").eos_id == 3
    with pytest.raises(ConfigError, match=r"data\.eos_token.*<absent>"):
        HFTokenizer(path, eos_token="<absent>")


def test_no_token_ends_a_document(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    train_bpe(path, ["<pad>"])
    with pytest.raises(ConfigError, match=r"data\.eos_token"):
        HFTokenizer(path)


@pytest.mark.parametrize(
    ("content", "size"),
    [
        ({"model": {"vocab": {"a": 0, "b": 7}}}, 8),
        ({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 9, "content": "<eos>"}]}, 10),
        ({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 1, "content": "b"}]}, 2),
        (
            {
                "model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0], ["c", -3.0]]},
                "added_tokens": None,
            },
            3,
        ),
    ],
)
def test_size_is_the_largest_id_plus_one(tmp_path: Path, content: Any, size: int) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    assert vocab_size_of(str(path)) == size


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "there is no file"),
        ("not json {", "is not JSON"),
        (b"\x93\xff\x00", "is not JSON"),
        ("{}", "holds no vocabulary"),
        ("[1, 2]", "holds no vocabulary"),
        ('{"model": {"vocab": "abc"}}', "holds no vocabulary"),
        ('{"model": {"vocab": {"a": "x"}}}', "holds no vocabulary"),
        ('{"model": {"vocab": {}}}', "empty vocabulary"),
    ],
)
def test_what_is_no_tokenizer_is_refused_by_name(tmp_path: Path, content: Any, reason: str) -> None:
    path = tmp_path / "tok.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for read in (vocab_size_of, load_tokenizer):
        with pytest.raises(ConfigError, match=reason) as caught:
            read(str(path))
        assert caught.value.problems[0].path == "data.tokenizer"
        assert str(path) in str(caught.value)
        assert caught.value.exit_status == 2


def test_json_with_a_vocabulary_that_the_package_refuses(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        load_tokenizer(str(path))


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert vocab_size_of(str(path)) == 1
    with pytest.raises(ForgeError) as caught:
        load_tokenizer(str(path))
    assert caught.value.hint == "pip install tokenizers"


def test_modules_of_the_configuration_import_no_torch() -> None:
    code = (
        "import sys, forge_core.data.tokenizer as t, forge_core.data.options, forge_core.data.components\n"
        "assert t.vocab_size_of('bytes') == 257\n"
        "heavy = {'torch', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import forge_core.data.order, forge_core.data.text, forge_core.data.synthetic\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
