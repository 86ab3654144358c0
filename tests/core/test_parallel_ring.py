"""Ring attention: the result of one process, what it sends and keeps, and the blocks it makes."""

from __future__ import annotations

from typing import Any

import pytest
import ringkit
import torch
from ringkit import documents_of, seen_of, tensors, turns_of
from torch import Tensor

from forge_core.parallel import blocks, flash
from forge_core.parallel.turns import Rule
from forge_core.testing.pool import WorkerPool

CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "grouped heads": {"kv_heads": 2},
    "documents": {"packed": True},
    "window": {"window": 5},
    "wide window, documents, grouped heads": {"window": 19, "packed": True, "kv_heads": 1},
    "a mask written out": {"free": True, "packed": True},
    "scale and cap": {"scale": 0.7, "softcap": 1.5, "packed": True},
    "narrow values": {"width": 3, "kv_heads": 2},
}


def run(case: dict[str, Any]) -> list[float]:
    return ringkit.differences(**case)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_find_what_one_process_does(pool2: WorkerPool, name: str) -> None:
    for found in pool2.run(run, CASES[name]):
        assert max(found) < 1e-12, found


@pytest.mark.parametrize("name", CASES)
def test_four_ranks_find_what_one_process_does(pool4: WorkerPool, name: str) -> None:
    for found in pool4.run(run, CASES[name]):
        assert max(found) < 1e-12, found


def test_scores_that_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain kernel takes queries a few at a time where their scores would be too many."""
    q, k, v, grad = (x.transpose(1, 2) for x in tensors(12, 2, 8))
    block = blocks.Block(torch.arange(12), torch.arange(12), 0.3, causal=True, window=7)
    found = []
    for most in (blocks.MOST_SCORES, 3 * 4 * 12 * 5):
        monkeypatch.setattr(blocks, "MOST_SCORES", most)
        out, lse = blocks.plain_forward(q, k, v, block)
        found.append([out, lse, *blocks.plain_backward(grad, q, k, v, out, lse, block)])
    assert len(list(blocks._parts(q, k))) == 3
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_low_precision_keeps_exact_sums(pool2: WorkerPool) -> None:
    for dtype, difference in pool2.run(ringkit.low):
        assert dtype == "torch.bfloat16"
        assert difference < 2**-6


def test_what_is_sent_and_kept(pool2: WorkerPool, pool4: WorkerPool) -> None:
    """Sixteen tokens a rank: 3 rows, 2 heads of keys and values with 16 numbers together, fp64."""
    message = 3 * 16 * 2 * 16 * 8
    for size, pool in ((2, pool2), (4, pool4)):
        for forward, sent, most in pool.run(ringkit.traffic, 16, False):
            assert forward == size - 1
            assert sent == [message] * (size - 1)
            assert most == 2 * message
        for forward, sent, most in pool.run(ringkit.traffic, 16, True):
            # keys and values once more, and a turn longer their gradients
            assert len(sent) - forward == (size - 1) + size
            assert set(sent) == {message}
            # those of two ranks, and the gradients sent on and those that come
            assert most == 4 * message


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_every_key_is_seen_once_and_nothing_in_vain(size: int, window: int | None) -> None:
    length = 16 * size
    expected = seen_of(1, length, window=window)[0].int()
    work: list[int] = []
    for rank in range(size):
        turns = turns_of(rank, size, length, Rule(window=window))
        counts = torch.zeros(length, length, dtype=torch.int32)
        work.append(0)
        for source in range(size):
            for mine, theirs, block in turns.blocks(source):
                mask = block.mask(slice(None))
                shape = len(block.queries), len(block.keys)
                seen = torch.ones(shape).bool() if mask is None else mask[0, 0, 0]
                assert seen.any()
                assert shape == (mine.stop - mine.start, theirs.stop - theirs.start)
                counts[block.queries[:, None], block.keys] += seen.int()
                work[-1] += seen.numel()
        assert torch.equal(counts[turns.queries], expected[turns.queries])
    if window is None:
        assert len(set(work)) == 1, "all ranks have the same work"
        assert sum(work) <= (0.5 + 0.5 / size) * length**2


class PlainOperators:
    """What torch's flash operators do, sequence by sequence."""

    @staticmethod
    def _pairs(queries: Tensor, keys: Tensor) -> list[tuple[slice, slice]]:
        bounds = zip(queries.tolist(), queries.tolist()[1:], keys.tolist(), keys.tolist()[1:], strict=False)
        return [(slice(a, b), slice(c, d)) for a, b, c, d in bounds]

    def _block(self, mine: slice, theirs: slice, causal: bool, scale: float) -> blocks.Block:
        places = torch.arange(mine.stop - mine.start), torch.arange(theirs.stop - theirs.start)
        return blocks.Block(*places, scale, causal=causal)

    def _flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, *rest: Any, **more: Any
    ) -> tuple[Tensor, ...]:
        most_queries, most_keys, dropout, causal = rest
        assert queries.dtype == keys.dtype == torch.int32
        assert len(queries) == len(keys)
        assert int(queries[-1]) == len(q)
        assert int(keys[-1]) == len(k)
        assert dropout == 0.0
        out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.inf, dtype=q.dtype)
        for mine, theirs in self._pairs(queries, keys):
            assert mine.stop - mine.start <= most_queries
            assert theirs.stop - theirs.start <= most_keys
            if mine.start == mine.stop or theirs.start == theirs.stop:
                continue  # what the kernel leaves there is not to matter
            block = self._block(mine, theirs, causal, more["scale"])
            part, sums = blocks.plain_forward(q[None, mine], k[None, theirs], v[None, theirs], block)
            out[mine], lse[:, mine] = part[0], sums[0].T
        return out, lse, torch.empty(0), torch.empty(0), torch.empty(0)

    def _flash_attention_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        queries: Tensor,
        keys: Tensor,
        *rest: Any,
        **more: Any,
    ) -> tuple[Tensor, ...]:
        causal = rest[3]
        found = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        for mine, theirs in self._pairs(queries, keys):
            if mine.start == mine.stop or theirs.start == theirs.stop:
                continue
            block = self._block(mine, theirs, causal, more["scale"])
            given = (grad[None, mine], q[None, mine], k[None, theirs], v[None, theirs], out[None, mine])
            parts = blocks.plain_backward(*given, lse.T[None, mine], block)
            for target, place, part in zip(found, (mine, theirs, theirs), parts, strict=True):
                target[place] = part[0]
        return tuple(found)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", [8, 3])
def test_documents_as_sequences_are_the_same_blocks(
    monkeypatch: pytest.MonkeyPatch, packed: bool, width: int
) -> None:
    """What the flash kernel is told, with plain attention in its place."""
    monkeypatch.setattr(flash, "_operators", PlainOperators)
    size, length = 4, 32
    q, k, v, grad = (x.transpose(1, 2) for x in tensors(length, 2, width))
    documents = documents_of(3, length) if packed else None
    _, lse = blocks.plain_forward(q, k, v, whole(length, documents))
    out, _ = blocks.plain_forward(q, k, v, whole(length, documents))
    compared = 0
    for rank in range(size):
        turns = turns_of(rank, size, length, Rule(documents))
        for source in range(size):
            for _, _, block in turns.blocks(source):
                parts = [x[:, p] for x, p in ((q, block.queries), (k, block.keys), (v, block.keys))]
                one, other = (f(*parts, block) for f in (blocks.plain_forward, flash.flash_forward))
                for a, b in zip(one, other, strict=True):
                    torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
                rest = [x[:, block.queries] for x in (out, lse)]
                given = (grad[:, block.queries], *parts, *rest, block)
                for a, b in zip(blocks.plain_backward(*given), flash.flash_backward(*given), strict=True):
                    torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
                compared += 1
    assert compared == size * size


def whole(length: int, documents: Tensor | None) -> blocks.Block:
    places = torch.arange(length)
    return blocks.Block(places, places, 0.3, causal=True, query_documents=documents, key_documents=documents)


def test_what_the_flash_kernel_takes() -> None:
    plain = torch.zeros(1, 2, 4, 64, dtype=torch.bfloat16)
    assert not flash.takes(plain, plain), "there is no CUDA device"


@pytest.mark.parametrize(("capability", "built", "runs"), [((7, 5), 1, 0), ((8, 0), 1, 1), ((9, 0), 0, 0)])
def test_older_devices_have_no_flash_kernel(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built: bool, runs: bool
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert flash.runs_on(torch.device("cuda")) == runs
    assert not flash.runs_on(torch.device("cpu"))
