"""Generation: the cache against whole forwards, batches, sampling, ends and errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from modelkit import config, decoder, tokens
from torch import Tensor

from forge_core.data.tokenizer import ByteTokenizer
from forge_core.errors import ForgeError, UsageError
from forge_core.model import Decoder
from forge_core.model.generate import DecoderGenerator, generate
from forge_core.model.sampling import Sampler, keep_top_p

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9]]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return decoder(config(qk_norm=True), seed=3).eval()


def by_whole_forwards(model: Decoder, prompt: list[int], count: int) -> list[int]:
    """Greedy, without a cache: the whole row again for every token."""
    row = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            row.append(int(model.logits(model(torch.tensor([row])))[0, -1].argmax()))
    return row[len(prompt) :]


@pytest.mark.parametrize("heads", [{"n_kv_heads": 4}, {"n_kv_heads": 2}, {"n_kv_heads": 1}])
def test_greedy_with_a_cache_equals_whole_forwards(heads: dict[str, Any]) -> None:
    model = decoder(config(**heads), seed=3).eval()
    for prompt in PROMPTS:
        found = generate(model, [prompt], max_new_tokens=12, temperature=0)
        assert found == [by_whole_forwards(model, prompt, 12)]


def test_the_example_is_not_constant(model: Decoder) -> None:
    rows = [by_whole_forwards(model, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(row) for row in rows}) == len(rows)
    assert all(len(set(row)) > 2 for row in rows)


def test_rows_of_unequal_length_get_what_they_get_alone(model: Decoder) -> None:
    alone = [generate(model, [prompt], max_new_tokens=12, temperature=0)[0] for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=12, temperature=0) == alone


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_chunked_prefill_equals_one_shot(model: Decoder, chunk: int) -> None:
    once = generate(model, PROMPTS, max_new_tokens=8, temperature=0)
    assert generate(model, PROMPTS, max_new_tokens=8, temperature=0, prefill_chunk=chunk) == once
    same = [PROMPTS[2], PROMPTS[2][::-1]]
    once = generate(model, same, max_new_tokens=8, temperature=0)
    assert generate(model, same, max_new_tokens=8, temperature=0, prefill_chunk=chunk) == once


@pytest.mark.parametrize("pieces", [[9], [4, 5], [1, 3, 5], [2] * 4 + [1], [1] * 9])
def test_hidden_states_in_pieces_equal_those_at_once(pieces: list[int]) -> None:
    model = decoder(dtype=torch.float64)
    batch = tokens(2, 9)
    cache = model.new_cache(2, 9)
    with torch.no_grad():
        found = torch.cat([model(piece, cache=cache) for piece in batch.split(pieces, 1)], 1)
        torch.testing.assert_close(found, model(batch), rtol=1e-12, atol=1e-12)
    assert cache.length == 9


def test_padding_of_either_side_leaves_hidden_states(model: Decoder) -> None:
    batch = tokens(1, 6)
    padding = torch.full((1, 3), 7)
    with torch.no_grad():
        alone = model(batch)
        left_valid = torch.tensor([[False] * 3 + [True] * 6])
        positions = (torch.arange(9)[None] - 3).clamp(min=0)
        left = torch.cat((padding, batch), 1)
        for cache in (None, model.new_cache(1, 9)):
            found = model(left, positions=positions, valid=left_valid, cache=cache)
            torch.testing.assert_close(found[:, 3:], alone, rtol=1e-4, atol=1e-5)
        right = torch.cat((batch, padding), 1)
        for cache in (None, model.new_cache(1, 10)):
            found = model(right, valid=left_valid.flip(1), cache=cache)
            torch.testing.assert_close(found[:, :6], alone, rtol=1e-4, atol=1e-5)
        # what follows right padding does not see it
        assert cache is not None
        last = torch.tensor([[2]])
        found = model(last, positions=torch.tensor([[6]]), cache=cache)
        torch.testing.assert_close(found, model(torch.cat((batch, last), 1))[:, -1:], rtol=1e-4, atol=1e-5)


def test_a_row_ends_with_its_end_and_the_others_go_on(model: Decoder) -> None:
    free = generate(model, PROMPTS, max_new_tokens=12, temperature=0)
    end = free[0][4]
    rows = generate(model, PROMPTS, max_new_tokens=12, temperature=0, eos_id=end)
    assert len({len(row) for row in rows}) > 1
    for row, whole in zip(rows, free, strict=True):
        stop = whole.index(end) + 1 if end in whole else 12
        assert row == whole[:stop]


def test_generation_stops_when_all_rows_have_ended(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plain = Decoder.forward

    def counted(self: Decoder, *args: Any, **inputs: Any) -> Tensor:
        calls.append(1)
        return plain(self, *args, **inputs)

    monkeypatch.setattr(Decoder, "forward", counted)
    end = by_whole_forwards(model, PROMPTS[0], 1)[0]
    calls.clear()
    assert generate(model, [PROMPTS[0]] * 2, max_new_tokens=12, temperature=0, eos_id=end) == [[end]] * 2
    assert len(calls) == 1
    free = generate(model, PROMPTS[::3], max_new_tokens=12, temperature=0)
    common = next(end for end in free[0] if end in free[1] and free[0].index(end) != free[1].index(end))
    calls.clear()
    rows = generate(model, PROMPTS[::3], max_new_tokens=12, temperature=0, eos_id=common)
    assert len(calls) == max(map(len, rows)) < 12, "rows end at different steps"
    calls.clear()
    generate(model, [PROMPTS[0]], max_new_tokens=5, temperature=0)
    assert len(calls) == 5, "no forward after the last token"


def test_sampling_follows_its_generator(model: Decoder) -> None:
    def run(seed: int, **rules: Any) -> list[list[int]]:
        seeded = torch.Generator().manual_seed(seed)
        return generate(model, PROMPTS, max_new_tokens=10, generator=seeded, **rules)

    assert run(1) == run(1)
    assert run(1) != run(2)
    greedy = generate(model, PROMPTS, max_new_tokens=10, temperature=0)
    assert run(1, top_k=1) == greedy
    assert run(1, top_p=1e-6) == greedy
    assert run(1, temperature=1e-4) == greedy
    assert run(1, top_p=1.0, top_k=100) == run(1)


def frequencies_of(sampler: Sampler, logits: Tensor, count: int = 20_000) -> Tensor:
    return torch.bincount(sampler(logits.expand(count, -1)), minlength=logits.shape[-1]) / count


def test_sampled_frequencies_equal_the_rules() -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])
    logits = probabilities.log()

    def sampler(**rules: Any) -> Sampler:
        return Sampler(generator=torch.Generator().manual_seed(0), **rules)

    hot = probabilities.sqrt() / probabilities.sqrt().sum()
    top = torch.tensor([0, 0.4, 0, 0.25, 0]) / 0.65
    nucleus = torch.tensor([0, 0.4, 0, 0.25, 0.2]) / 0.85
    both = torch.tensor([0, 0.4, 0, 0.25, 0]) / 0.65
    for rules, want in (
        ({}, probabilities),
        ({"temperature": 2.0}, hot),
        ({"top_k": 2}, top),
        ({"top_p": 0.7}, nucleus),
        # after the cut to two tokens the first alone has 0.4 / 0.65 of the mass
        ({"top_k": 2, "top_p": 0.7}, both),
        ({"top_k": 2, "top_p": 0.6}, torch.tensor([0, 1.0, 0, 0, 0])),
    ):
        torch.testing.assert_close(frequencies_of(sampler(**rules), logits), want, rtol=0, atol=0.015)


def test_top_p_keeps_a_token_if_less_comes_before_it() -> None:
    probabilities = torch.tensor([[0.125, 0.5, 0.125, 0.25], [1.0, 0.0, 0.0, 0.0]])
    assert keep_top_p(probabilities, 0.5)[0].tolist() == [0, 0.5, 0, 0]
    assert keep_top_p(probabilities, 0.51)[0].tolist() == [0, 0.5, 0, 0.25]
    assert keep_top_p(probabilities, 1e-9)[0].tolist() == [0, 0.5, 0, 0]
    assert torch.equal(keep_top_p(probabilities, 1.0), probabilities)


def test_low_precision_logits_are_sampled_in_fp32() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).bfloat16()
    seeded = torch.Generator().manual_seed(0)
    found = frequencies_of(Sampler(generator=seeded), logits)
    torch.testing.assert_close(found, logits[0].float().softmax(-1), rtol=0, atol=0.015)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"top_p": float("nan")}, "top_p = nan"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"prefill_chunk": 0}, "prefill_chunk = 0"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[13]]}, "outside the vocabulary of 13"),
        ({"prompts": [[-1]]}, "outside the vocabulary"),
        ({"max_new_tokens": 30}, "prompt 0 of 3 tokens and 30 new ones exceed model.max_seq_len = 32"),
    ],
)
def test_arguments_out_of_range_are_refused(model: Decoder, arguments: dict[str, Any], message: str) -> None:
    given = {"prompts": [[1, 2, 3]], "max_new_tokens": 2, **arguments}
    with pytest.raises(UsageError, match=message.replace(".", r"\.")):
        generate(model, given.pop("prompts"), **given)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_model_that_has_diverged_chooses_nothing(temperature: float, wrong: float) -> None:
    scores = torch.tensor([[0.0, 1.0], [0.5, wrong]])
    with pytest.raises(ForgeError, match="the model's scores are not finite"):
        Sampler(temperature=temperature)(scores)
    Sampler(temperature=temperature)(torch.tensor([[0.0, float("-inf")]]))  # of a token that may not be


def test_the_whole_length_can_be_used(model: Decoder) -> None:
    assert len(generate(model, [[1, 2, 3]], max_new_tokens=29, temperature=0)[0]) == 29
    assert generate(model, [], max_new_tokens=2) == []


def test_the_mode_comes_back_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(config(dropout=0.5))
    model.layers["1"].eval()
    before = [module.training for module in model.modules()]
    first = generate(model, PROMPTS, max_new_tokens=8, temperature=0)
    assert generate(model, PROMPTS, max_new_tokens=8, temperature=0) == first, "no dropout meanwhile"
    assert [module.training for module in model.modules()] == before

    def broken(self: Decoder, hidden: Tensor) -> Tensor:
        assert not self.training
        raise RuntimeError("broken head")

    monkeypatch.setattr(Decoder, "logits", broken)
    with pytest.raises(RuntimeError, match="broken head"):
        generate(model, PROMPTS, max_new_tokens=8)
    assert [module.training for module in model.modules()] == before


def test_training_goes_on_after_generation() -> None:
    model = decoder()
    generate(model, PROMPTS, max_new_tokens=3)
    model(tokens(1, 5)).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if name != "head.weight")


def test_a_cache_refuses_what_it_cannot_hold(model: Decoder) -> None:
    cache = model.new_cache(1, 4)
    with torch.no_grad():
        model(tokens(1, 3), cache=cache)
        with pytest.raises(ForgeError, match="5 tokens do not fit a cache of 4"):
            model(tokens(1, 2), cache=cache)
        with pytest.raises(ForgeError, match="packed documents cannot be decoded with a cache"):
            model(tokens(1, 1), documents=torch.zeros(1, 1, dtype=torch.int32), cache=cache)


def test_generation_under_bf16_autocast() -> None:
    model = decoder()
    with torch.autocast("cpu", torch.bfloat16):
        rows = generate(model, PROMPTS, max_new_tokens=4, temperature=0)
    assert [len(row) for row in rows] == [4] * 4


def test_the_generator_of_the_text_family_speaks_text() -> None:
    tokenizer = ByteTokenizer()
    model = decoder(config(vocab_size=tokenizer.vocab_size))
    session: Any = SimpleNamespace(model=model, control=None, data=SimpleNamespace(tokenizer=tokenizer))
    texts = DecoderGenerator().generate(session, ["def ", ""], max_new_tokens=6, temperature=0)
    for text, prompt in zip(texts, [list(b"def "), [256]], strict=True):
        alone = generate(model, [prompt], max_new_tokens=6, temperature=0, eos_id=256)[0]
        assert text == tokenizer.decode(alone)
