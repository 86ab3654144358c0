"""Packed documents, padding and mask predicates: who sees whom."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from modelkit import PlainDecoder, config, decoder, tokens
from torch import Tensor

from forge_core.contract import LayerContext
from forge_core.errors import ForgeError
from forge_core.loop.accumulate import to_device
from forge_core.model import Decoder, attend, build_decoder, default_parts
from forge_core.model.documents import positions_within, run_bounds, run_lengths
from forge_core.model.masks import AttentionMasks, DocumentRuns, VarlenRuns
from forge_core.parallel.sequence import SequencePart
from forge_core.testing import tiny_session

STRATEGIES = ("mask", "documents")
FOUR_AND_SIX = torch.tensor([[0] * 4 + [1] * 6] * 2, dtype=torch.int32)


def logits(built: Decoder, batch: Tensor, **inputs: Any) -> Tensor:
    return built.logits(built(batch, **inputs))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_changing_the_first_document_leaves_the_second(strategy: str) -> None:
    built = decoder(config(attention=strategy))
    batch = tokens(2, 10)
    changed = batch.clone()
    changed[:, :4] = (batch[:, :4] + 5) % 13
    before, after = (logits(built, b, documents=FOUR_AND_SIX) for b in (batch, changed))
    assert (before[:, :4] - after[:, :4]).abs().max() > 1e-2
    assert (before[:, 4:] - after[:, 4:]).abs().max() <= 1e-6
    alone = logits(built, batch), logits(built, changed)
    assert (alone[0][:, 4:] - alone[1][:, 4:]).abs().max() > 1e-2, "without documents it would leak"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packed_logits_equal_those_of_separate_documents(strategy: str) -> None:
    built = decoder(config(attention=strategy), torch.float64)
    batch = tokens(2, 10)
    packed = logits(built, batch, documents=FOUR_AND_SIX)
    separate = torch.cat((logits(built, batch[:, :4]), logits(built, batch[:, 4:])), 1)
    torch.testing.assert_close(packed, separate, rtol=1e-12, atol=1e-12)
    given = logits(built, batch, documents=FOUR_AND_SIX, positions=positions_within(FOUR_AND_SIX))
    assert torch.equal(given, packed), "positions restart without being asked to"


def test_packed_gradients_are_the_sum_of_separate_ones() -> None:
    batch = tokens(2, 10)
    gradients = []
    for pieces in ([(0, 10)], [(0, 4), (4, 10)]):
        built = decoder(config(attention="documents"), torch.float64)
        for start, end in pieces:
            documents = FOUR_AND_SIX if len(pieces) == 1 else None
            logits(built, batch[:, start:end], documents=documents).square().sum().backward()
        gradients.append({name: p.grad for name, p in built.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    "rows",
    [
        [[0] * 10, [0, 1, 1, 1, 2, 2, 2, 2, 3, 3]],
        [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [7, 7, 7, 7, 7, 7, 7, 8, 8, 8]],
        [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]],
    ],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_strategies_are_equal_forward_and_backward(rows: list[list[int]], kv_heads: int) -> None:
    documents = torch.tensor(rows, dtype=torch.int32)
    batch = tokens(2, 10)
    results = []
    for strategy in STRATEGIES:
        built = decoder(config(attention=strategy, n_kv_heads=kv_heads), torch.float64)
        out = logits(built, batch, documents=documents)
        out.square().sum().backward()
        results.append((out, {name: p.grad for name, p in built.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-12, atol=1e-12)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], rtol=1e-9, atol=1e-10, msg=name)
    plain = PlainDecoder(
        config(n_kv_heads=kv_heads), decoder(config(n_kv_heads=kv_heads), torch.float64).state_dict()
    )
    for row in range(2):
        see = (documents[row][:, None] == documents[row]) & torch.ones(10, 10, dtype=torch.bool).tril()
        want = plain.logits(batch[row], see, positions_within(documents)[row].tolist())
        torch.testing.assert_close(results[0][0][row], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_one_document_a_row_is_plain_causal_attention(strategy: str) -> None:
    built = decoder(config(attention=strategy))
    batch = tokens(2, 10)
    documents = torch.tensor([[3] * 10, [5] * 10], dtype=torch.int32)
    assert built.context(torch.zeros(2, 10, 16), documents=documents).mask is None
    assert torch.equal(logits(built, batch, documents=documents), logits(built, batch))


def test_auto_takes_documents_when_they_are_long_and_a_mask_when_short_or_compiled() -> None:
    built = decoder(config(max_seq_len=128))
    x = torch.zeros(2, 128, 16)
    long = torch.arange(128).expand(2, 128) // 64
    short = torch.arange(128).expand(2, 128) // 4
    assert built.context(x, documents=long).mask == DocumentRuns((64, 64, 64, 64))
    assert built.context(x, documents=short).mask.shape == (2, 1, 128, 128)
    for block in built.layers.values():
        block.compile(backend="eager")
    assert built.context(x, documents=long).mask.shape == (2, 1, 128, 128)


def test_preparing_reads_no_tensor_of_the_model() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    for strategy in ("auto", *STRATEGIES):
        built = decoder(config(attention=strategy))
        with Reads() as reads:
            built(tokens(2, 10), documents=FOUR_AND_SIX, positions=positions_within(FOUR_AND_SIX))
        assert reads.count == 0


def test_bounds_of_documents_need_no_look_at_the_device() -> None:
    generator = torch.Generator().manual_seed(0)
    for most in (None, 24, 30):
        documents = (torch.rand(3, 10, generator=generator) < 0.3).cumsum(1).int()
        lengths = run_lengths(documents)
        assert 3 < len(lengths) <= 24
        bounds = run_bounds(documents, most)
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        assert bounds.tolist() == ends + [30] * ((most or len(lengths)) - len(lengths))
        assert bounds.dtype == torch.int32


@pytest.mark.parametrize("strategy", ["auto", "varlen"])
def test_a_known_number_of_documents_spares_reading_them(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device nothing can be read: context ranks in a ring, and the kernel for many lengths."""
    monkeypatch.setattr(AttentionMasks, "_on_device", lambda self, x: self.strategy)
    documents = torch.zeros(2, 16, dtype=torch.int32, device="meta")
    part = SequencePart(attention="ring")
    if strategy == "auto":
        two: Any = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0)
        part.context, part.by_context = two, True
    x = torch.zeros(2, 16 // part.ranks, 8, device="meta")
    context = LayerContext(documents=documents, document_count=5, part=part)
    mask = AttentionMasks(strategy).prepare(context, x)
    assert mask.bounds.shape == (6,)
    with pytest.raises(NotImplementedError, match="meta"):
        AttentionMasks(strategy).prepare(LayerContext(documents=documents, part=part), x)


def test_a_batch_that_moves_tells_how_many_documents_it_has() -> None:
    batch = {"tokens": torch.zeros(2, 10), "documents": FOUR_AND_SIX}
    assert to_device(batch, torch.device("cpu")) is batch
    assert to_device(batch, torch.device("meta"))["document_count"] == 4
    assert "document_count" not in to_device({"tokens": batch["tokens"]}, torch.device("meta"))


def test_masks_are_told_how_many_documents_a_batch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int | None] = []
    prepare = AttentionMasks.prepare

    def noted(masks: AttentionMasks, context: LayerContext, *rest: Any) -> Any:
        told.append(context.document_count)
        return prepare(masks, context, *rest)

    monkeypatch.setattr(AttentionMasks, "prepare", noted)
    with tiny_session() as session:
        batch = session.stream.take(1)[0]
        session.forward(session.model, batch)
        session.forward(session.model, {**batch, "document_count": 7})
    assert told == [None, 7]


def test_documents_are_runs() -> None:
    documents = torch.tensor([[4, 4, 4, 9], [9, 1, 1, 0]], dtype=torch.int32)
    assert run_lengths(documents) == [3, 1, 1, 2, 1]
    assert positions_within(documents).tolist() == [[0, 1, 2, 0], [0, 0, 1, 0]]
    assert positions_within(torch.zeros(1, 1, dtype=torch.int32)).tolist() == [[0]]


@pytest.mark.parametrize("strategy", ["flex", "varlen"])
def test_kernels_of_another_device_are_refused_clearly(strategy: str) -> None:
    built = decoder(config(attention=strategy))
    with pytest.raises(ForgeError, match=f'"{strategy}" needs a CUDA device, this one is cpu'):
        built(tokens(2, 10), documents=FOUR_AND_SIX)
    built(tokens(2, 10))


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The strategies of a CUDA device, prepared on a CPU."""
    monkeypatch.setattr(AttentionMasks, "_on_device", lambda self, x: self.strategy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without")
        yield


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("inputs", ["documents", "valid", "both"])
def test_flex_masks_say_the_same_as_the_block_mask(inputs: str) -> None:
    batch = tokens(2, 10)
    valid = torch.ones(2, 10, dtype=torch.bool)
    valid[0, :3] = False
    given: dict[str, Any] = {}
    if inputs != "valid":
        given["documents"] = FOUR_AND_SIX
    if inputs != "documents":
        given["valid"] = valid
    with torch.no_grad():
        flex, mask = (logits(decoder(config(attention=s)), batch, **given) for s in ("flex", "mask"))
    torch.testing.assert_close(flex, mask, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("any_device")
def test_varlen_passes_the_documents_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(
        q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, _k: Tensor, longest: int, *_: Any, **how: Any
    ) -> Tensor:
        assert how == {"window_size": (-1, 0), "enable_gqa": True}
        assert bounds.dtype == torch.int32
        parts = []
        for start, end in zip(bounds.tolist(), bounds[1:].tolist(), strict=False):
            assert end - start <= longest
            one = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
            parts.append(attend(*one)[0].transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain)
    built = decoder(config(attention="varlen"))
    mask = built.context(torch.zeros(2, 10, 16), documents=FOUR_AND_SIX).mask
    assert isinstance(mask, VarlenRuns)
    assert mask.bounds.tolist() == [0, 4, 10, 14, 20]
    batch = tokens(2, 10)
    want = logits(decoder(config(attention="mask")), batch, documents=FOUR_AND_SIX)
    torch.testing.assert_close(logits(built, batch, documents=FOUR_AND_SIX), want)


def test_padding_is_seen_by_nobody_and_stays_finite() -> None:
    built = decoder()
    batch = tokens(2, 10)
    valid = torch.ones(2, 10, dtype=torch.bool)
    valid[0, :3] = valid[0, 6] = valid[1, 8:] = False
    changed = torch.where(valid, batch, (batch + 4) % 13)
    mask = built.context(torch.zeros(2, 10, 16), valid=valid).mask
    assert mask.any(-1).all(), "a kernel may divide by zero where nothing is seen"
    before, after = (logits(built, b, valid=valid) for b in (batch, changed))
    assert before.isfinite().all()
    assert (before[valid] - after[valid]).abs().max() <= 1e-6
    plain = PlainDecoder(config(), built.state_dict())
    kept = [c for c in range(10) if valid[0, c]]
    want = plain.logits(batch[0, kept], positions=kept)
    torch.testing.assert_close(before[0, kept].double(), want, rtol=1e-4, atol=1e-4)
    before.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in built.parameters())


def with_masks(*pairs: Any, **changes: Any) -> Decoder:
    """A decoder with mask predicates and the weights of `decoder()`."""
    model = config(**changes)
    parts: Any = default_parts(model)
    parts.masks = lambda: pairs
    built = build_decoder(model, parts)
    built.load_state_dict(decoder(model).state_dict())
    return built


def prefix(context: LayerContext, q: Tensor, k: Tensor) -> Tensor:
    """The first three keys of every row are open to all."""
    return k < 3


def window(context: LayerContext, q: Tensor, k: Tensor) -> Tensor:
    """At most two keys back, by a number that each row brings: (B, S, K)."""
    return (q - k)[None] <= context.extras["toy"][:, None, None]


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_predicates_admit_and_hide(strategy: str) -> None:
    built = with_masks(("or", prefix), ("and", window), attention=strategy)
    batch = tokens(2, 10)
    reach = torch.tensor([2, 4])
    found = logits(built, batch, documents=FOUR_AND_SIX, extras={"toy": reach})
    q, k = torch.arange(10)[:, None], torch.arange(10)[None]
    plain = PlainDecoder(config(), built.state_dict())
    for row in range(2):
        same = FOUR_AND_SIX[row][:, None] == FOUR_AND_SIX[row]
        see = ((k <= q) | (k < 3)) & same & (q - k <= reach[row])
        assert see[0, 2]
        assert not see[3, 0] or row == 1
        want = plain.logits(batch[row], see, positions_within(FOUR_AND_SIX)[row].tolist())
        torch.testing.assert_close(found[row].double(), want, rtol=1e-4, atol=1e-4)


def test_a_predicate_that_hides_everything_leaves_finite_numbers() -> None:
    built = with_masks(("and", lambda context, q, k: (q != 4) & (k >= 0)))
    assert logits(built, tokens(1, 10)).isfinite().all()


def test_predicates_combine_by_and_or_or() -> None:
    with pytest.raises(ForgeError, match="combines by 'xor'"):
        with_masks(("xor", prefix))
