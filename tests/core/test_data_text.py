"""Real text: which files are taken, what is held out, and what cannot be read."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import pytest

from forge_core.data import corpus
from forge_core.data.corpus import find_documents, library_folder, split_documents
from forge_core.data.options import TextOptions
from forge_core.data.packing import PackedTokens
from forge_core.data.source import SourceSpec
from forge_core.data.text import build
from forge_core.data.tokenizer import ByteTokenizer, load_tokenizer
from forge_core.errors import DataError

END = ByteTokenizer.eos_id
SPEC = SourceSpec(
    name="text",
    path=None,
    split="train",
    seq_len=8,
    tokenizer=ByteTokenizer(),
    vocab_size=257,
    pack=True,
    holdout=0.05,
    seed=0,
)


def text_source(
    path: Path | None, split: Literal["train", "holdout", "all"] = "train", **changes: Any
) -> PackedTokens:
    options = TextOptions(patterns=changes.pop("patterns", ["*"]))
    return build(
        attrs.evolve(SPEC, path=None if path is None else str(path), split=split, **changes), options
    )


def documents_of(source: PackedTokens) -> list[bytes]:
    """The documents that the tokens of a source spell."""
    ends = np.flatnonzero(source.tokens == END)
    assert ends[-1] == len(source.tokens) - 1
    starts = [0, *(ends[:-1] + 1)]
    return [source.tokens[a:b].astype(np.uint8).tobytes() for a, b in zip(starts, ends, strict=True)]


def write_tree(root: Path, count: int = 60) -> dict[str, bytes]:
    contents = {}
    for i in range(count):
        name = f"part{i % 3}/note{i}.txt"
        contents[name] = f"note {i}\n".encode() * (1 + i % 7)
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(contents[name])
    return contents


def test_standard_library_is_read_whole_and_without_loss() -> None:
    began = time.perf_counter()
    train, held = text_source(None, seq_len=256), text_source(None, "holdout", seq_len=256)
    took = time.perf_counter() - began
    found = find_documents(None, ["*"])
    files = sorted(document.path.read_bytes() for document in found)
    assert sorted(documents_of(train) + documents_of(held)) == files
    assert sum(map(len, files)) > 5_000_000
    assert 0.03 < len(held.tokens) / len(train.tokens) < 0.06
    assert took < 5.0
    names = [document.name for document in found]
    assert "os.py" in names
    assert "json/decoder.py" in names
    assert not [n for n in names if n.startswith(("test/", "site-packages/")) or "/tests/" in n]


def test_same_order_again_and_unrelated_neighbours() -> None:
    first = split_documents(find_documents(None, ["*"]), 0.05)
    assert first == split_documents(list(reversed(find_documents(None, ["*"]))), 0.05)
    names = [document.name for document in first[0]]
    assert names != sorted(names)
    assert not {document.path for document in first[0]} & {document.path for document in first[1]}


def test_folder_is_searched_and_split_by_document(tmp_path: Path) -> None:
    contents = write_tree(tmp_path)
    train, held = text_source(tmp_path, holdout=0.2), text_source(tmp_path, "holdout", holdout=0.2)
    assert sorted(documents_of(train) + documents_of(held)) == sorted(contents.values())
    assert not set(documents_of(train)) & set(documents_of(held))
    total = len(train.tokens) + len(held.tokens)
    assert 0.15 < len(held.tokens) / total <= 0.22
    everything = text_source(tmp_path, "all", holdout=0.2)
    assert sorted(documents_of(everything)) == sorted(contents.values())


def test_a_new_file_moves_few_others(tmp_path: Path) -> None:
    write_tree(tmp_path)
    before = {document.name for document in split_documents(find_documents(str(tmp_path), ["*"]), 0.2)[1]}
    (tmp_path / "new.txt").write_text("something new\n")
    after = {document.name for document in split_documents(find_documents(str(tmp_path), ["*"]), 0.2)[1]}
    assert len(before ^ after) <= 4


def test_no_holdout_trains_on_everything(tmp_path: Path) -> None:
    contents = write_tree(tmp_path)
    assert sorted(documents_of(text_source(tmp_path, holdout=0.0))) == sorted(contents.values())


def test_one_file_is_cut_at_a_line(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    lines = [f"line {i} of the book, naïve\n".encode() for i in range(1000)]
    path.write_bytes(b"".join(lines))
    train, held = text_source(path), text_source(path, "holdout")
    (head,), (tail,) = documents_of(train), documents_of(held)
    assert head + tail == path.read_bytes()
    assert head.endswith(b"\n")
    assert 0.04 < len(tail) / len(head + tail) <= 0.05


def test_one_line_is_cut_between_characters(tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    for padding in range(4):
        path.write_text("x" * padding + "語" * 1000, encoding="utf-8")
        for split in ("train", "holdout"):
            (part,) = documents_of(text_source(path, split))
            part.decode("utf-8")


def test_what_is_left_out_of_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.txt", ".hidden", ".git/config", "__pycache__/x.txt", "deep/er/b.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"this is {name}\n")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    os.mkfifo(tmp_path / "pipe")
    with caplog.at_level(logging.WARNING, "forge.data"):
        found = find_documents(str(tmp_path), ["*"])
    assert [document.name for document in found] == ["a.txt", "deep/er/b.md"]
    assert "1 binary file in" in caplog.text
    assert "picture.png" in caplog.text
    assert [d.name for d in find_documents(str(tmp_path), ["*.md"])] == ["deep/er/b.md"]


def test_binary_files_are_told_once_for_both_splits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for n in range(20):
        (tmp_path / f"{n}.txt").write_text(f"this is {n}, a text\n" * 10)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    for split in ("train", "holdout"):
        text_source(tmp_path, split)
    assert caplog.text.count("binary file") == 1


def test_any_bytes_are_text_when_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "junk.bin"
    path.write_bytes(bytes(range(256)) * 4 + b"\xff\xfe" + "é語🙂".encode())
    assert documents_of(text_source(path, "all")) == [path.read_bytes()]


def test_tokenizer_json_gives_its_own_ids(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["<unk>", "</s>", "one", "two", "three"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("one two three four")
    (tmp_path / "corpus" / "b.txt").write_bytes(b"two \xff one")
    tokenizer = load_tokenizer(str(tmp_path))
    source = text_source(tmp_path / "corpus", "all", tokenizer=tokenizer, vocab_size=5, seq_len=2)
    documents = np.split(source.tokens, np.flatnonzero(source.tokens == 1)[:-1] + 1)
    assert sorted(document.tolist() for document in documents) == [[2, 3, 4, 0, 1], [3, 0, 2, 1]]
    assert source.max_token == 4


def test_holdout_shorter_than_a_sequence_is_one_short_sequence(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("0123456789" * 10)
    held = text_source(path, "holdout", seq_len=64)
    assert len(held) == 1
    assert held[0]["tokens"].shape == (5,)


@pytest.mark.parametrize("name", ["absent.txt", "absent/folder"])
def test_missing_path_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=rf"there is no file or folder {tmp_path / name}"):
        text_source(tmp_path / name)


def test_broken_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("fine\n")
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"cannot read .*link\.txt"):
        text_source(tmp_path)


def test_empty_corpus_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    for path in (tmp_path, tmp_path / "empty.txt"):
        with pytest.raises(DataError, match=rf"no text in {path}"):
            text_source(path)
    (tmp_path / "a.txt").write_text("text\n")
    with pytest.raises(DataError) as caught:
        text_source(tmp_path, patterns=["*.md"])
    assert "*.md" in caught.value.hint


def test_too_little_text_for_a_sequence(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("short")
    with pytest.raises(DataError, match=rf"{path}.*6 tokens are too few for one sequence of 8 \+ 1"):
        text_source(path, "all")


def test_python_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path, tmp_path / "absent.zip"):
        monkeypatch.setattr(corpus, "library_folder", lambda folder=folder: folder)
        with pytest.raises(DataError, match=rf"without the sources.*{folder}") as caught:
            text_source(None)
        assert "data.path" in caught.value.hint
    assert (library_folder() / "os.py").is_file()


UNREADABLE = """
import os, sys
from forge_core.data.corpus import find_documents
from forge_core.errors import DataError
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
try:
    for document in find_documents(sys.argv[1], ["*"]):
        document.read()
except DataError as error:
    print(error.message, "|", error.hint)
    sys.exit(error.exit_status)
"""


@pytest.mark.parametrize("blocked", ["b.txt", "folder"])
@pytest.mark.parametrize("named", [True, False])
def test_unreadable_for_this_user(blocked: str, named: bool) -> None:
    root = Path(tempfile.mkdtemp())
    try:
        root.chmod(0o755)
        (root / "a.txt").write_text("fine\n")
        (root / "b.txt").write_text("secret\n")
        (root / "folder").mkdir()
        (root / "folder" / "c.txt").write_text("secret\n")
        (root / blocked).chmod(0)
        path = root / blocked if named else root
        command = [sys.executable, "-c", UNREADABLE, str(path)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert result.returncode == 2, result.stderr
        assert f"cannot read {root / blocked}: Permission denied |" in result.stdout
        assert "Traceback" not in result.stderr
    finally:
        (root / blocked).chmod(0o700)
        shutil.rmtree(root)


def test_prepared_tokens_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"version": 1}\n' * 20)
    (tmp_path / "tokens-00000.documents.npy").write_bytes(b"\x93NUMPY\0")
    with pytest.raises(DataError, match="tokens that were prepared") as caught:
        text_source(tmp_path, "train")
    assert 'data.source = "tokens"' in caught.value.hint


@pytest.mark.parametrize(
    ("names", "meant"),
    [
        (["a.jsonl"], "jsonl"),
        (["a.jsonl", "b.ndjson"], "jsonl"),
        (["a.parquet"], "parquet"),
        (["a.jsonl", "readme.md"], None),
        (["a.txt"], None),
    ],
)
def test_files_of_another_source_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: list[str], meant: str | None
) -> None:
    for name in names:
        (tmp_path / name).write_text('{"text": "some words"}\n' * 20)
    with caplog.at_level(logging.WARNING, "forge.data"):
        for split in ("train", "holdout"):
            text_source(tmp_path, split)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (meant is not None)
    assert meant is None or told[0].endswith(f'is data.source = "{meant}" meant?')
