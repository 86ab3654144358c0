"""One position for all: packed text, mixed and under phases, over changing numbers of ranks; and streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datakit import Flow, Numbers, global_step, ids, mixed_stream, mixture

from forge_core.contract import Batch
from forge_core.data.order import StreamOrder
from forge_core.data.packing import PackedTokens
from forge_core.data.stream import SampleStream
from forge_core.errors import DataError
from forge_core.testing import WorkerPool

SEQUENCE = 8
PHASES = [(7, {"a": 1.0, "b": 3.0}), (15, {"b": 1.0})]
PLAN = [(4, 1, 2, 5), (2, 2, 2, 4), (1, 4, 2, 6), (4, 2, 1, 5)]
"""Ranks, batch size, micro-batches, updates; 8 samples an update, phases begin inside and between them."""


def packed(seed: int, documents: int) -> PackedTokens:
    """Documents of random length, of tokens that say whose they are, packed."""
    rng = np.random.default_rng(seed)
    rows = [np.append(rng.integers(1, 1000, rng.integers(3, 30)), 0) for _ in range(documents)]
    return PackedTokens(np.concatenate(rows).astype(np.uint16), end=0, seq_len=SEQUENCE)


def packed_stream(batch_size: int, rank: int, ranks: int, workers: int = 0) -> SampleStream:
    sources = [packed(1, 40), packed(2, 20)]
    order = mixture(
        {"a": 3.0, "b": 1.0},
        {"a": len(sources[0]), "b": len(sources[1])},
        phases=PHASES,
        global_batch=8,
    )
    return SampleStream(
        sources,
        order,
        batch_size=batch_size,
        data_rank=rank,
        data_size=ranks,
        global_batch=8,
        workers=workers,
    )


def rows_of(parts: list[list[Batch]]) -> list[list[Any]]:
    """Rows of a step in their global order, with all that a batch holds."""
    count = len(parts[0])
    return [
        [rank[m][key][row].tolist() for key in sorted(rank[m])]
        for m in range(count)
        for rank in parts
        for row in range(len(rank[m]["tokens"]))
    ]


def straight(updates: int) -> list[list[list[Any]]]:
    stream = packed_stream(8, 0, 1)
    return [rows_of([stream.take(1)]) for _ in range(updates)]


def test_four_ranks_to_two_to_one_to_four_with_packing_mixture_and_phases() -> None:
    state: dict[str, Any] | None = None
    seen = []
    for ranks, batch_size, count, updates in PLAN:
        streams = [packed_stream(batch_size, rank, ranks) for rank in range(ranks)]
        for stream in streams:
            if state is not None:
                stream.load_state_dict(state)
        seen += [rows_of([stream.take(count) for stream in streams]) for _ in range(updates)]
        states = [stream.state_dict() for stream in streams]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert seen == straight(20)
    assert state is not None
    assert state["position"] == 160
    assert state["update"] == 20
    # of each source every sample of an epoch came once before one came again
    drawn = {name: kept["drawn"] for name, kept in state["sources"].items()}
    assert sum(drawn.values()) == 160
    for number, name in enumerate("ab"):
        samples = state["sources"][name]["samples"]
        rows = [row for step in seen for row in step if row[2] == number]  # documents, positions, sources
        firsts = [str(row) for row in rows[:samples]]
        assert len(rows) == drawn[name]
        assert len(set(firsts)) == len(firsts)


def step_on_ranks(ranks: int, batch_size: int, count: int, updates: int, workers: int, state: Any) -> Any:
    """Run on every process of a pool; those beyond `ranks` have nothing to do."""
    rank = torch.distributed.get_rank()
    if rank >= ranks:
        return None
    stream = packed_stream(batch_size, rank, ranks, workers)
    if state is not None:
        stream.load_state_dict(state)
    steps = [stream.take(count) for _ in range(updates)]
    plain = [[{k: v.tolist() for k, v in batch.items()} for batch in step] for step in steps]
    saved = stream.state_dict()
    stream.close()
    return {"steps": plain, "state": saved}


@pytest.mark.slow
def test_the_same_over_real_processes(pool4: WorkerPool) -> None:
    state: Any = None
    seen = []
    for ranks, batch_size, count, updates in PLAN:
        found = pool4.run(step_on_ranks, ranks, batch_size, count, updates, 1 if ranks == 2 else 0, state)
        found = [each for each in found if each is not None]
        assert all(each["state"] == found[0]["state"] for each in found)
        state = found[0]["state"]
        for update in range(updates):
            parts = [
                [{k: torch.tensor(v) for k, v in batch.items()} for batch in each["steps"][update]]
                for each in found
            ]
            seen.append(rows_of(parts))
    assert seen == straight(20)


def test_changed_global_batch_is_refused_unless_allowed() -> None:
    for make in (
        lambda **more: SampleStream([Flow(20)], StreamOrder(), **more),
        lambda **more: mixed_stream(mixture({"a": 1, "b": 1}, {"a": 20, "b": 20}), **more),
    ):
        stream = make(batch_size=2, global_batch=4)
        for _ in range(3):
            stream.take(2)
        state = stream.state_dict()
        same = make(batch_size=4, global_batch=4)
        same.load_state_dict(state)
        assert ids(same, 1)[0] == [i for batch in ids(stream, 2) for i in batch]
        with pytest.raises(DataError, match="the global batch was 4 samples, is 6"):
            make(batch_size=6, global_batch=6).load_state_dict(state)
        allowed = make(batch_size=6, global_batch=6, allow_changed=True)
        allowed.load_state_dict(state)
        straight_on = make(batch_size=1)
        expected = [ids(straight_on, 1)[0][0] for _ in range(18)]
        assert ids(allowed, 1)[0] == expected[12:]
        assert allowed.state_dict()["update"] == 4


def test_changed_source_is_named() -> None:
    stream = mixed_stream(mixture({"a": 1, "web": 1}, {"a": 20, "web": 20}), batch_size=4)
    stream.take(1)
    order = mixture({"a": 1, "web": 1}, {"a": 20, "web": 20})
    other = mixed_stream(order, batch_size=4, sources=[Numbers(20), Numbers(20, first=7, label="other")])
    with pytest.raises(DataError, match="source web: fingerprint was numbers/20, is other/20") as caught:
        other.load_state_dict(stream.state_dict())
    assert "source a" not in str(caught.value)


def flows(ranks: int, **arguments: Any) -> list[SampleStream]:
    return [
        SampleStream([Flow(8)], StreamOrder(), batch_size=1, data_rank=r, data_size=ranks, **arguments)
        for r in range(ranks)
    ]


def test_one_stream_for_two_ranks_gives_each_sample_once_an_epoch() -> None:
    streams = flows(2)
    epochs = [[i for _ in range(4) for i in global_step(streams, 1)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [stream.sources[0].opened for stream in streams] == [[0], [1]]  # type: ignore[union-attr]


def test_stream_goes_on_exactly_on_other_ranks() -> None:
    whole = flows(1)
    expected = [i for _ in range(40) for i in global_step(whole, 1)]
    state: Any = None
    seen: list[int] = []
    for ranks, updates in ((2, 5), (1, 7), (4, 4)):
        streams = flows(ranks)
        for stream in streams:
            if state is not None:
                stream.load_state_dict(state)
        for _ in range(updates):
            seen += global_step(streams, 1)
        state = streams[0].state_dict()
        assert all(stream.state_dict() == state for stream in streams)
    assert seen == expected[: len(seen)]


@pytest.mark.parametrize("parts", [2, 3, 4, 7, 8, 100])
def test_ranks_read_only_the_parts_that_their_samples_are_in(parts: int) -> None:
    """Whatever the split, the order is the same; where parts suffice, no sample is read on two ranks."""

    def make(ranks: int, batch_size: int) -> list[SampleStream]:
        return [
            SampleStream(
                [Flow(96, parts=parts)],
                StreamOrder(),
                batch_size=batch_size,
                data_rank=r,
                data_size=ranks,
                global_batch=8,
            )
            for r in range(ranks)
        ]

    straight_on = make(1, 8)
    expected = [global_step(straight_on, 1) for _ in range(20)]
    assert sorted(i for step in expected[:12] for i in step) == list(range(96)) or parts == 7
    state: Any = None
    seen: list[list[int]] = []
    for ranks, batch_size, count, updates in ((4, 1, 2, 5), (2, 2, 2, 4), (1, 4, 2, 6), (4, 2, 1, 5)):
        streams = make(ranks, batch_size)
        for stream in streams:
            if state is not None:
                stream.load_state_dict(state)
        seen += [global_step(streams, count) for _ in range(updates)]
        state = streams[0].state_dict()
        assert all(stream.state_dict() == state for stream in streams)
    assert seen == expected
    lanes = {2: 2, 3: 2, 4: 4, 7: 4, 8: 8, 100: 8}[parts]
    assert state["start"]["lanes"] == {"data": [8, lanes]}
    fresh = make(2, 4)
    for _ in range(5):
        global_step(fresh, 1)
    reads = [set(stream.sources[0].read) for stream in fresh]  # type: ignore[union-attr]
    assert not reads[0] & reads[1]
    assert all(len(each) == 20 for each in reads)


def test_lanes_stay_those_of_the_start_under_another_global_batch() -> None:
    def make(batch_size: int) -> SampleStream:
        return SampleStream(
            [Flow(48, parts=4)],
            StreamOrder(),
            batch_size=batch_size,
            global_batch=batch_size,
            allow_changed=True,
        )

    stream = make(8)
    head = [i for _ in range(3) for i in ids(stream, 1)[0]]
    other = make(6)
    other.load_state_dict(stream.state_dict())
    assert sorted(head + [i for _ in range(4) for i in ids(other, 1)[0]]) == list(range(48))


def test_stream_that_cannot_go_on_is_refused_with_the_reason() -> None:
    stream = SampleStream([Flow(8, unrepeatable="it is a socket")], StreamOrder(), batch_size=1)
    stream.load_state_dict(stream.state_dict())  # nothing read yet
    stream.take(1)
    again = SampleStream([Flow(8, unrepeatable="it is a socket")], StreamOrder(), batch_size=1)
    with pytest.raises(DataError, match="cannot go on where the saved run stopped: it is a socket"):
        again.load_state_dict(stream.state_dict())


def test_stream_in_a_mixture_keeps_its_place() -> None:
    def make() -> SampleStream:
        order = mixture({"flow": 1, "b": 1}, {"flow": None, "b": 30}, phases=[(9, {"flow": 1})])
        return SampleStream([Flow(12), Numbers(30, first=1000)], order, batch_size=1)

    whole = make()
    expected = [ids(whole, 1)[0][0] for _ in range(40)]
    flow = [i for i in expected if i < 1000]
    assert sorted(flow[:12]) == sorted(flow[12:24]) == list(range(12))
    first = make()
    head = [ids(first, 1)[0][0] for _ in range(11)]
    again = make()
    again.load_state_dict(first.state_dict())
    assert head + [ids(again, 1)[0][0] for _ in range(29)] == expected


def test_position_is_plain_data(tmp_path: Path) -> None:
    import json

    stream = mixed_stream(mixture({"a": 3, "b": 1}, {"a": 60, "b": 60}), batch_size=2)
    stream.take(3)
    state = json.loads(json.dumps(stream.state_dict()))
    again = mixed_stream(mixture({"a": 3, "b": 1}, {"a": 60, "b": 60}), batch_size=2)
    again.load_state_dict(state)
    assert ids(again, 2) == ids(stream, 2)


def test_files_of_a_streamed_data_set_are_shared_out_among_ranks(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    import json

    from forge_core.data.hf import build
    from forge_core.data.options import HfOptions
    from forge_core.data.source import SourceSpec
    from forge_core.data.tokenizer import ByteTokenizer

    folder = tmp_path / "rows"
    folder.mkdir()
    for i in range(4):  # 40 documents of 8 tokens each: 80 sequences of 4 in all
        rows = [json.dumps({"text": f"{i}{j:02}abcd"}) for j in range(10)]
        (folder / f"{i}.jsonl").write_text("\n".join(rows) + "\n")

    def make(ranks: int, batch_size: int) -> list[SampleStream]:
        spec = SourceSpec(
            name="rows",
            path=str(folder),
            split="train",
            seq_len=4,
            tokenizer=ByteTokenizer(),
            vocab_size=257,
            pack=True,
            holdout=0.0,
            seed=0,
            cache_dir=str(tmp_path / "cache"),
        )
        return [
            SampleStream(
                [build(spec, HfOptions(streaming=True))],
                StreamOrder(),
                batch_size=batch_size,
                data_rank=r,
                data_size=ranks,
                global_batch=4,
            )
            for r in range(ranks)
        ]

    def step(streams: list[SampleStream]) -> list[str]:
        rows = [row for stream in streams for row in stream.take(1)[0]["tokens"].tolist()]
        return [ByteTokenizer().decode(row) for row in rows]

    whole, halves = make(1, 4), make(2, 2)
    expected = [step(whole) for _ in range(30)]
    assert whole[0].state_dict()["start"]["lanes"] == {"data": [4, 4]}
    # each row of an update comes from a file of its own, and the two ranks read two files each
    firsts = [batch[0] for batch in zip(*expected[:10], strict=True)]
    assert sorted(text[0] for text in firsts) == ["0", "1", "2", "3"]
    seen = [step(halves) for _ in range(9)]
    again = make(1, 4)
    again[0].load_state_dict(halves[1].state_dict())
    assert seen + [step(again) for _ in range(21)] == expected
