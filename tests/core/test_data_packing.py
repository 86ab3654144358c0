"""Packing: documents kept apart, every token a target once, and what a batch costs."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from forge_core.data.packing import PackedTokens, pack_windows
from forge_core.errors import DataError

END = 99


def plain_pack(window: list[int], end: int) -> dict[str, list[int]]:
    """The definition, token by token."""
    documents, positions, targets = [], [], []
    document = position = 0
    for s, token in enumerate(window[:-1]):
        documents.append(document)
        positions.append(position)
        targets.append(-100 if token == end else window[s + 1])
        position += 1
        if token == end:
            document, position = document + 1, 0
    return {"tokens": window[:-1], "targets": targets, "positions": positions, "documents": documents}


def random_row(n: int, seed: int, ends: float = 0.2) -> NDArray[np.uint16]:
    rng = np.random.default_rng(seed)
    row = rng.integers(0, 50, n).astype(np.uint16)
    row[rng.random(n) < ends] = END
    return row


def test_worked_example() -> None:
    arrays = pack_windows(np.array([[5, 6, END, 7, 8, END, END, 9]]), END, keep_apart=True)
    assert arrays["tokens"].tolist() == [[5, 6, END, 7, 8, END, END]]
    assert arrays["targets"].tolist() == [[6, END, -100, 8, END, -100, -100]]
    assert arrays["documents"].tolist() == [[0, 0, 0, 1, 1, 1, 2]]
    assert arrays["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 0]]


def test_two_documents_in_a_row_of_ten() -> None:
    row = np.array([[1, 2, 3, END, 4, 5, 6, 7, 8, END, 1]] * 2)
    arrays = pack_windows(row, END, keep_apart=True)
    assert arrays["positions"][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert (arrays["targets"] != -100).sum(axis=1).tolist() == [8, 8]
    assert arrays["targets"][1, 3] == arrays["targets"][1, 9] == -100


def test_documents_that_are_not_kept_apart_are_one_text() -> None:
    row = np.array([[5, 6, END, 7, 8, END, END, 9]])
    arrays = pack_windows(row, END, keep_apart=False)
    assert "documents" not in arrays
    assert arrays["targets"].tolist() == [[6, END, 7, 8, END, END, 9]]
    assert arrays["positions"].tolist() == [list(range(7))]


@pytest.mark.parametrize("ends", [0.0, 0.0003, 0.01])
def test_long_and_short_documents_are_numbered_alike(ends: float) -> None:
    """Long ones are numbered one by one, short ones all together."""
    windows = random_row(3 * 4001, 7, ends).reshape(3, 4001)
    arrays = pack_windows(windows, END, keep_apart=True)
    for r in range(3):
        expected = plain_pack([int(t) for t in windows[r]], END)
        assert {key: value[r].tolist() for key, value in arrays.items()} == expected


def test_dtypes_shapes_and_memory_layout() -> None:
    arrays = pack_windows(random_row(36, 0).reshape(4, 9), END, keep_apart=True)
    expected = {"tokens": np.int64, "targets": np.int64, "positions": np.int64, "documents": np.int32}
    assert {key: value.dtype for key, value in arrays.items()} == expected
    assert all(value.shape == (4, 8) and value.flags.c_contiguous for value in arrays.values())


@pytest.mark.parametrize("n", [9, 10, 16, 17, 18, 100, 1001])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_samples_equal_the_definition_and_supervise_each_token_once(n: int, length: int) -> None:
    row = random_row(n, n)
    source = PackedTokens(row, end=END, seq_len=length)
    seen = np.zeros(n, dtype=int)
    for i in range(len(source)):
        start = min(i * length, n - length - 1)
        expected = plain_pack([int(t) for t in row[start : start + length + 1]], END)
        earlier = i * length - start
        expected["targets"][:earlier] = [-100] * earlier
        sample = source[i]
        assert {key: value.tolist() for key, value in sample.items()} == expected
        for s, target in enumerate(sample["targets"]):
            seen[start + s + 1] += target != -100
    # the first token of a document has no target that could be it
    assert seen.tolist() == [0, *(int(token != END) for token in row[:-1])]


def test_batch_equals_the_samples_one_by_one() -> None:
    source = PackedTokens(random_row(1003, 5), end=END, seq_len=16)
    indices = np.array([len(source) - 1, 0, 7, 7, 31])
    batch = source.batch(indices)
    for row, index in enumerate(indices):
        for key, value in source[int(index)].items():
            assert np.array_equal(batch[key][row], value), key


def test_mapped_file_gives_the_same_samples(tmp_path: Path) -> None:
    row = random_row(500, 1)
    np.save(tmp_path / "row.npy", row)
    mapped = PackedTokens(np.load(tmp_path / "row.npy", mmap_mode="r"), end=END, seq_len=16)
    plain = PackedTokens(row, end=END, seq_len=16)
    indices = np.arange(len(plain))
    for key, value in plain.batch(indices).items():
        assert np.array_equal(mapped.batch(indices)[key], value)
    assert mapped.fingerprint == plain.fingerprint


def test_fingerprint_changes_with_tokens_and_cut() -> None:
    row = random_row(500, 1)
    other = row.copy()
    other[250] += 1
    prints = {
        PackedTokens(row, end=END, seq_len=16).fingerprint,
        PackedTokens(other, end=END, seq_len=16).fingerprint,
        PackedTokens(row, end=END, seq_len=17).fingerprint,
        PackedTokens(row, end=END, seq_len=16, keep_apart=False).fingerprint,
        PackedTokens(row[:-1], end=END, seq_len=16).fingerprint,
        PackedTokens(row, end=END + 1, seq_len=16).fingerprint,
    }
    assert len(prints) == 6
    assert PackedTokens(row.copy(), end=END, seq_len=16).fingerprint in prints


def test_too_short_a_row_and_a_wrong_index() -> None:
    with pytest.raises(DataError, match=r"16 tokens are too few for one sequence of 16 \+ 1"):
        PackedTokens(random_row(16, 0), end=END, seq_len=16)
    with pytest.raises(DataError, match=r"1 token is too few for one sequence of 16 \+ 1"):
        PackedTokens(random_row(1, 0), end=END, seq_len=16)
    source = PackedTokens(random_row(17, 0), end=END, seq_len=16)
    assert len(source) == 1
    for index in (1, -1):
        with pytest.raises(IndexError):
            source[index]


def test_batch_does_not_loop_over_tokens() -> None:
    """8 x 2048 tokens take well under a millisecond; a Python loop would take tens."""
    source = PackedTokens(random_row(200_000, 2, ends=0.01), end=END, seq_len=2048)
    indices = np.arange(8)
    took = []
    for _ in range(20):
        began = time.perf_counter()
        source.batch(indices)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.005
