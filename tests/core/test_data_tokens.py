"""Token files: what is read, what is refused and why, and what is held out."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from forge_core.data import scan
from forge_core.data.holdout import split_shards
from forge_core.data.options import TokensOptions
from forge_core.data.packing import RowSource
from forge_core.data.row import Segment, Shard, TokenRow
from forge_core.data.shards import bin_header
from forge_core.data.source import SourceSpec
from forge_core.data.tokenizer import ByteTokenizer
from forge_core.data.tokens import build
from forge_core.errors import DataError

END = 256
SPEC = SourceSpec(
    name="tokens",
    path=None,
    split="train",
    seq_len=8,
    tokenizer=ByteTokenizer(),
    vocab_size=257,
    pack=True,
    holdout=0.0,
    seed=0,
)


def documents(count: int = 50, seed: int = 0) -> list[NDArray[np.uint16]]:
    rng = np.random.default_rng(seed)
    return [np.append(rng.integers(0, 256, rng.integers(1, 30)), END).astype(np.uint16) for _ in range(count)]


def row(count: int = 50, seed: int = 0) -> NDArray[np.uint16]:
    return np.concatenate(documents(count, seed))


def open_tokens(path: Path | str, options: TokensOptions | None = None, **changes: Any) -> RowSource:
    return build(attrs.evolve(SPEC, path=str(path), **changes), options or TokensOptions())


def all_arrays(source: RowSource) -> dict[str, list[Any]]:
    return {key: value.tolist() for key, value in source.batch(np.arange(len(source))).items()}


@pytest.fixture
def tokens() -> NDArray[np.uint16]:
    return row()


def test_npy_and_three_kinds_of_bin_give_the_same_samples(tokens: NDArray[np.uint16], tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", tokens)
    (tmp_path / "own.bin").write_bytes(bin_header(tokens.dtype, len(tokens)) + tokens.tobytes())
    ints = np.zeros(256, dtype=np.int32)
    ints[:3] = 20240520, 1, len(tokens)
    (tmp_path / "ints.bin").write_bytes(ints.tobytes() + tokens.tobytes())
    (tmp_path / "bare.bin").write_bytes(tokens.tobytes())
    told = TokensOptions(dtype="uint16")
    sources = [open_tokens(tmp_path / name) for name in ("a.npy", "own.bin", "ints.bin")]
    sources.append(open_tokens(tmp_path / "bare.bin", told))
    expected = all_arrays(sources[0])
    assert sum(len(r) for r in expected["tokens"]) >= len(tokens) - 1
    for source in sources:
        assert all_arrays(source) == expected
        assert source.fingerprint == sources[0].fingerprint


def test_uint16_without_header_is_never_guessed(tmp_path: Path) -> None:
    """An even number of 16-bit ids is also a number of 32-bit ids: only its owner knows."""
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match=r"x\.bin has no header that tells the type") as error:
        open_tokens(tmp_path / "x.bin")
    assert 'data.tokens.dtype = "uint16"' in error.value.hint
    with pytest.raises(DataError, match=r"x\.bin: token id 6\d+ does not fit model.vocab_size = 257"):
        open_tokens(tmp_path / "x.bin", TokensOptions(dtype="uint32"))


def test_shards_are_one_row_in_the_order_of_their_names(tokens: NDArray[np.uint16], tmp_path: Path) -> None:
    cuts = [0, 300, 301, 500, len(tokens)]
    for i in range(4):
        np.save(tmp_path / f"s{i}.npy", tokens[cuts[i] : cuts[i + 1]])
    whole = TokenRow([Shard(name="x", tokens=tokens)], end=END)
    shards = open_tokens(tmp_path)
    assert isinstance(shards.row, TokenRow)
    assert np.array_equal(shards.tokens, tokens)
    assert len(shards) == -(-(len(tokens) - 1) // 8)
    starts = np.arange(0, len(tokens) - 20, 3)
    ours, plain = shards.row.windows(starts, 20), whole.windows(starts, 20)
    assert np.array_equal(ours.tokens, plain.tokens)
    # a shard's end is a document's end, too
    expected = set(zip(plain.rows.tolist(), plain.columns.tolist(), strict=True)) | {
        (r, cut - start)
        for r, start in enumerate(starts.tolist())
        for cut in cuts[1:-1]
        if 0 < cut - start < 20
    }
    assert set(zip(ours.rows.tolist(), ours.columns.tolist(), strict=True)) == expected
    assert all_arrays(open_tokens(f"{tmp_path}/s*.npy")) == all_arrays(shards)


def test_index_finds_the_documents_that_the_end_token_finds(tmp_path: Path) -> None:
    docs = documents()
    index = np.cumsum([0, *(len(d) for d in docs)], dtype=np.int64)
    np.save(tmp_path / "t.npy", np.concatenate(docs))
    by_end = all_arrays(open_tokens(tmp_path))
    np.save(tmp_path / "t.documents.npy", index)
    assert all_arrays(open_tokens(tmp_path)) == by_end
    # without any end token the index alone tells
    np.save(tmp_path / "t.npy", np.where(np.concatenate(docs) == END, 7, np.concatenate(docs)))
    other = all_arrays(open_tokens(tmp_path))
    assert other["documents"] == by_end["documents"]
    assert other["positions"] == by_end["positions"]


def test_supervised_sidecar_masks_targets(tmp_path: Path) -> None:
    ids = np.arange(17, dtype=np.uint16)
    np.save(tmp_path / "t.npy", ids)
    np.save(tmp_path / "t.supervised.npy", (ids % 2 == 0).astype(np.uint8))
    targets = open_tokens(tmp_path).batch(np.array([0, 1]))["targets"]
    assert targets.tolist() == [
        [-100, 2, -100, 4, -100, 6, -100, 8],
        [-100, 10, -100, 12, -100, 14, -100, 16],
    ]


def cut_short_npy(folder: Path) -> None:
    np.save(folder / "a.npy", row())
    content = (folder / "a.npy").read_bytes()
    (folder / "b.npy").write_bytes(content[: len(content) // 2])


def cut_short_header(folder: Path) -> None:
    (folder / "a.npy").write_bytes(b"\x93NUMPY\x01\x00\x76\x00{'descr")


def cut_short_bin(folder: Path) -> None:
    ids = row()
    (folder / "a.bin").write_bytes(bin_header(ids.dtype, len(ids)) + ids.tobytes()[:-3])


def other_type(folder: Path) -> None:
    np.save(folder / "a.npy", row())
    np.save(folder / "b.npy", row().astype(np.uint32))


def no_tokens(folder: Path) -> None:
    np.save(folder / "a.npy", row())
    np.save(folder / "b.npy", row()[:0])


def floats(folder: Path) -> None:
    np.save(folder / "a.npy", row().astype(np.float32))


def two_dimensions(folder: Path) -> None:
    np.save(folder / "a.npy", row()[:100].reshape(10, 10))


def beyond(folder: Path) -> None:
    np.save(folder / "a.npy", row())
    np.save(folder / "b.npy", np.append(row(), 300).astype(np.uint16))


def negative(folder: Path) -> None:
    np.save(folder / "a.npy", np.append(row().astype(np.int32), -1))


def wrong_index(folder: Path) -> None:
    np.save(folder / "a.npy", row())
    np.save(folder / "a.documents.npy", np.array([0, 5], dtype=np.int64))


def later_version(folder: Path) -> None:
    (folder / "a.bin").write_bytes(struct.pack("<8sII8sQ", b"FORGETOK", 9, 32, b"<u2", 1) + b"\0\0")


def nothing(folder: Path) -> None:
    (folder / "readme.txt").write_text("no tokens")


def unfinished(folder: Path) -> None:
    np.save(folder / "tokens-00000.npy", row())
    (folder / "plan.json").write_text("{}")


def damaged_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"version": 1')


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (cut_short_npy, r"b\.npy is cut short: its header promises \d+ tokens of uint16, it holds \d+"),
        (cut_short_header, r"a\.npy is no \.npy file, or its header is cut short"),
        (cut_short_bin, r"a\.bin is cut short: its header promises"),
        (other_type, r"b\.npy holds uint32, .*a\.npy holds uint16"),
        (no_tokens, r"b\.npy holds no tokens"),
        (floats, r"a\.npy holds float32 of shape"),
        (two_dimensions, r"a\.npy holds uint16 of shape \(10, 10\)"),
        (beyond, r"b\.npy: token id 300 does not fit model\.vocab_size = 257"),
        (negative, r"a\.npy: token id -1 at \d+ is negative"),
        (wrong_index, r"a\.npy: documents\.npy does not fit: int64 from 0 to 5 for \d+ tokens"),
        (later_version, r"a\.bin has a header of version 9"),
        (nothing, r"no \.npy or \.bin file in"),
        (unfinished, r"is a preparation that was not finished"),
        (damaged_manifest, r"manifest\.json is damaged"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(make: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(DataError, match=message) as error:
        open_tokens(tmp_path)
    assert "\n" not in error.value.message
    assert error.value.exit_status == 2


def test_missing_path_and_too_few_tokens(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs the path"):
        build(SPEC, TokensOptions())
    with pytest.raises(DataError, match="there is no file or folder"):
        open_tokens(tmp_path / "none.npy")
    np.save(tmp_path / "a.npy", row()[:8])
    with pytest.raises(DataError, match=r"8 tokens are too few for one sequence of 8 \+ 1"):
        open_tokens(tmp_path)


def test_largest_token_of_a_large_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "SMALL", 10)
    np.save(tmp_path / "a.npy", row())
    cache = tmp_path / "cache"
    assert open_tokens(tmp_path / "a.npy", cache_dir=str(cache)).max_token == 256
    (known,) = cache.glob("scans/*.json")
    assert json.loads(known.read_text())["max_token"] == 256
    monkeypatch.setattr(scan, "_read_through", lambda shard: pytest.fail("read again"))
    assert open_tokens(tmp_path / "a.npy", cache_dir=str(cache)).max_token == 256
    # another content is another file
    monkeypatch.undo()
    monkeypatch.setattr(scan, "SMALL", 10)
    np.save(tmp_path / "a.npy", row()[:-1] % 100)
    assert open_tokens(tmp_path / "a.npy", cache_dir=str(cache)).max_token == 99


def test_fingerprint_notices_content_number_and_cut_but_no_move(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        folder.mkdir()
        np.save(folder / "0.npy", row())
    print_ = open_tokens(a).fingerprint
    assert open_tokens(b).fingerprint == print_
    assert open_tokens(a, seq_len=9).fingerprint != print_
    assert open_tokens(a, packing="best_fit").fingerprint != print_
    assert open_tokens(a, holdout=0.2).fingerprint != print_
    changed = row()
    changed[100] = (changed[100] + 1) % 256
    np.save(b / "0.npy", changed)
    assert open_tokens(b).fingerprint != print_
    np.save(b / "0.npy", row()[:-1])
    assert open_tokens(b).fingerprint != print_
    for name, content in (
        ("documents", np.array([0, 7, len(row())])),
        ("documents", np.array([0, 8, len(row())])),
        ("supervised", np.ones(len(row()), dtype=np.uint8)),
        ("supervised", np.arange(len(row()), dtype=np.uint64).astype(np.uint8)),
    ):
        np.save(a / f"0.{name}.npy", content)
        before, print_ = print_, open_tokens(a).fingerprint
        assert print_ != before


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("holdout", [0.05, 0.3])
def test_holdout_is_whole_documents_spread_over_the_corpus(indexed: bool, holdout: float) -> None:
    docs = documents(30_000, seed=3)
    shards = []
    for part in (docs[:9000], docs[9000:9100], docs[9100:]):
        index = np.cumsum([0, *(len(d) for d in part)], dtype=np.int64)
        shards.append(Shard(name="x", tokens=np.concatenate(part), documents=index if indexed else None))
    total = sum(len(shard.tokens) for shard in shards)
    train, held = split_shards(shards, holdout, END)
    rows = [TokenRow(shards, segments, end=END) for segments in (train, held)]
    assert sum(len(r) for r in rows) == total
    assert abs(len(rows[1]) / total - holdout) < 0.01
    assert sum(len(r.documents()[0]) for r in rows) == len(docs)  # none is cut
    expected = min(64, int(total * holdout) // (1 << 14))
    assert len(held) >= expected >= 1
    for segment in held:
        assert shards[segment.shard].tokens[segment.stop - 1] == END
    assert split_shards(shards, holdout, END) == (train, held)
    assert split_shards(shards, 0.0, END) == (
        [Segment(i, 0, len(s.tokens)) for i, s in enumerate(shards)],
        [],
    )


def test_one_long_document_is_cut_for_the_holdout(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.append(np.arange(999) % 256, END).astype(np.uint16))
    train = open_tokens(tmp_path, holdout=0.1)
    held = open_tokens(tmp_path, holdout=0.1, split="holdout")
    assert len(train.tokens) == 900
    assert len(held.tokens) == 100
