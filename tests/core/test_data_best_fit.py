"""Best-fit packing: against a plain implementation, a worked example, and the documents on their own."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from modelkit import config, decoder
from numpy.typing import NDArray

from forge_core.data.best_fit import BestFitTokens, best_fit_decreasing
from forge_core.data.row import Segment, Shard, TokenRow
from forge_core.errors import DataError
from forge_core.model import Decoder

END = 99


def plain_best_fit(lengths: NDArray[np.int64], room: int) -> list[int]:
    """Tokens in each bin, piece by piece: the longest first, where it leaves the least room."""
    left: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [(space, i) for i, space in enumerate(left) if space >= length]
        if not fitting:
            left.append(room)
            fitting = [(room, len(left) - 1)]
        left[min(fitting)[1]] -= length
    return sorted(room - space for space in left)


@pytest.mark.parametrize("seed", range(40))
def test_bins_are_those_of_the_plain_rule(seed: int) -> None:
    rng = np.random.default_rng(seed)
    room = int(rng.integers(1, 40))
    lengths = rng.integers(1, room + 1, rng.integers(1, 80))
    filled = np.bincount(best_fit_decreasing(lengths, room), lengths)
    assert sorted(filled.astype(int).tolist()) == plain_best_fit(lengths, room)


def test_bins_do_not_depend_on_how_wide_a_number_is_sorted() -> None:
    """Rooms around 2^16, from where lengths are not sorted as numbers of 16 bits."""
    lengths = np.random.default_rng(0).integers(1, 2**16, 3000)
    lengths[:2] = 2**16 - 1
    for room in (2**16 - 1, 2**16):
        filled = np.bincount(best_fit_decreasing(lengths, room), lengths)
        assert sorted(filled.astype(int).tolist()) == plain_best_fit(lengths, room)


def row_of(documents: list[list[int]], supervised: list[int] | None = None) -> TokenRow:
    index = np.cumsum([0, *(len(d) for d in documents)], dtype=np.int64)
    tokens = np.array([t for d in documents for t in d], dtype=np.uint16)
    mask = None if supervised is None else np.array(supervised, dtype=np.uint8)
    return TokenRow([Shard(name="x", tokens=tokens, documents=index, supervised=mask)], end=END)


def test_worked_example() -> None:
    """Sequences of 6: the document of 8 is cut into 6 and 2; 6 fills one, 4 + 2 fills another, 3 is left."""
    row = row_of([[1, 2, 3, END], [*range(10, 17), END], [21, 22, END]])
    source = BestFitTokens(row, seq_len=6)
    assert len(source) == 3
    arrays = source.batch(np.arange(3))
    assert arrays["tokens"].tolist() == [
        [10, 11, 12, 13, 14, 15],
        [1, 2, 3, END, 16, END],
        [21, 22, END, END, END, END],
    ]
    # the cut document goes on with 16, which its first piece predicts
    assert arrays["targets"].tolist() == [
        [11, 12, 13, 14, 15, 16],
        [2, 3, END, -100, END, -100],
        [22, END, -100, -100, -100, -100],
    ]
    assert arrays["documents"].tolist() == [[0] * 6, [0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert arrays["positions"].tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2]]
    assert arrays["valid"].tolist() == [[True] * 6, [True] * 6, [True] * 3 + [False] * 3]
    assert source.padding == pytest.approx(3 / 18)
    assert {key: value.dtype for key, value in arrays.items()} == {
        "tokens": np.int64,
        "targets": np.int64,
        "positions": np.int64,
        "documents": np.int32,
        "valid": np.bool_,
    }


@pytest.mark.parametrize(
    ("documents", "advice"),
    [
        (
            [[1, 2, 3, END]] * 3,
            "3 sequences of 6 tokens from 3 pieces of documents, 33.33 % left over; "
            'a longer train.seq_len or data.packing = "concatenate" leaves less',
        ),
        (
            [[1, 2, END]],
            "1 sequence of 6 tokens from 1 piece of documents, 50.00 % left over; "
            'a shorter train.seq_len or more data or data.packing = "concatenate" leaves less',
        ),
        ([[1, 2, END]] * 2, "1 sequence of 6 tokens from 2 pieces of documents, 0.00 % left over"),
    ],
)
def test_much_that_is_left_over_comes_with_a_way_out(
    documents: list[list[int]], advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="forge.data"):
        BestFitTokens(row_of(documents), seq_len=6)
    assert [record.getMessage() for record in caplog.records] == [f"text: {advice}"]


def test_what_holds_no_target_is_left_out() -> None:
    row = row_of([[END], [1, 2, 3, 4, 5, 6, END], [7, END]])
    source = BestFitTokens(row, seq_len=6)
    arrays = source.batch(np.arange(len(source)))
    # the seventh token of the second document is the last target of its first piece
    assert arrays["targets"].tolist() == [[2, 3, 4, 5, 6, END], [END, -100, -100, -100, -100, -100]]
    with pytest.raises(DataError, match="no document of 2 tokens has anything to learn"):
        BestFitTokens(row_of([[END], [END]]), seq_len=6)


@pytest.mark.parametrize("length", [5, 16, 64])
def test_every_token_but_the_first_of_a_document_is_a_target_once(length: int) -> None:
    rng = np.random.default_rng(length)
    documents = [[*range(1000 * i, 1000 * i + n - 1), END] for i, n in enumerate(rng.integers(1, 150, 60))]
    tokens = np.array([t for d in documents for t in d], dtype=np.uint32)
    half = len(documents) // 2
    at = sum(len(d) for d in documents[:half])
    shards = [
        Shard(name=str(i), tokens=part, documents=None) for i, part in enumerate((tokens[:at], tokens[at:]))
    ]
    source = BestFitTokens(TokenRow(shards, end=END), seq_len=length)
    arrays = source.batch(np.arange(len(source)))
    targets = arrays["targets"][arrays["targets"] != -100]
    expected = [t for d in documents for t in d[1:]]
    assert sorted(targets.tolist()) == sorted(expected)
    # where a target lies in the same sequence, it is the next token of the same document
    inside = (arrays["targets"][:, :-1] != -100) & (np.diff(arrays["documents"]) == 0)
    assert np.array_equal(arrays["targets"][:, :-1][inside], arrays["tokens"][:, 1:][inside])
    assert np.array_equal(arrays["positions"] == 0, np.diff(arrays["documents"], prepend=-1) != 0)


def test_batch_equals_the_samples_one_by_one_and_is_a_function_of_the_number() -> None:
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(0, 50, n).tolist(), END] for n in rng.integers(1, 40, 100)]
    first, again = (BestFitTokens(row_of(documents), seq_len=32) for _ in range(2))
    indices = np.array([3, 0, 3, len(first) - 1])
    batch = first.batch(indices)
    for row, index in enumerate(indices.tolist()):
        for key, value in again[index].items():
            assert np.array_equal(batch[key][row], value), key
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != BestFitTokens(row_of(documents), seq_len=31).fingerprint


def test_a_segment_ends_a_document_and_masks_are_kept() -> None:
    tokens = np.arange(10, dtype=np.uint16)
    mask = np.array([0, 1, 0, 1, 1, 0, 0, 1, 1, 1], dtype=np.uint8)
    shard = Shard(name="x", tokens=tokens, documents=np.array([0, 6, 10]), supervised=mask)
    row = TokenRow([shard], [Segment(0, 0, 4), Segment(0, 6, 10)], end=END)
    source = BestFitTokens(row, seq_len=8)
    (targets,) = source.batch(np.array([0]))["targets"]
    # 0 1 2 3 | 6 7 8 9, of which 1, 3, 7, 8 and 9 are learnt
    assert targets.tolist() == [1, -100, 3, -100, 7, 8, 9, -100]


def test_a_million_documents_take_seconds_and_leave_little_over() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.0, 1.2, 1_000_000), 2, 2048).astype(np.int64)
    began = time.process_time()
    bins = best_fit_decreasing(lengths, 2048)
    assert time.process_time() - began < 5
    filled = np.bincount(bins, lengths)
    assert filled.max() <= 2048
    assert 1 - lengths.sum() / (2048 * len(filled)) < 0.001


def test_packed_documents_do_not_see_each_other() -> None:
    """Loss of a packed sequence equals that of its documents on their own."""
    rng = np.random.default_rng(1)
    documents = [[*rng.integers(0, 90, n).tolist(), END] for n in (3, 5, 9, 12)]
    source = BestFitTokens(row_of(documents), seq_len=16)
    model = decoder(config(vocab_size=100), torch.float64)
    together = sum(loss_sum(model, source[i]) for i in range(len(source)))
    alone = 0.0
    for document in documents:
        ids = np.array(document)
        sample = {
            "tokens": ids,
            "targets": np.append(ids[1:], -100),
            "positions": np.arange(len(ids)),
            "documents": np.zeros(len(ids), dtype=np.int32),
        }
        alone += loss_sum(model, sample)
    assert together == pytest.approx(alone, abs=1e-10)


def loss_sum(model: Decoder, sample: dict[str, NDArray[np.int64]]) -> float:
    batch = {key: torch.from_numpy(np.ascontiguousarray(value))[None] for key, value in sample.items()}
    with torch.no_grad():
        hidden = model(batch["tokens"], positions=batch["positions"], documents=batch["documents"])
        logits = model.logits(hidden).flatten(0, 1)
    loss = F.cross_entropy(logits, batch["targets"].flatten(), ignore_index=-100, reduction="sum")
    return float(loss)


def test_padding_is_marked_and_a_document_of_its_own() -> None:
    """So that nothing routes or counts it, and no mask has to be made for it."""
    source = BestFitTokens(row_of([[1, 2, 3, END], [4, 5, 6, 7, END], [1, 2, 3, 4, 5, END]]), seq_len=7)
    batch = source.batch(np.arange(len(source)))
    assert batch["valid"].dtype == bool
    assert not batch["valid"].all()
    for documents, valid, targets in zip(batch["documents"], batch["valid"], batch["targets"], strict=True):
        assert not set(documents[valid]) & set(documents[~valid])
        assert (targets[~valid] == -100).all()
