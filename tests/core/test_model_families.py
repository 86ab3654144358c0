"""Options of the decoder that families other than Llama need, against plain loops and by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from modelkit import PlainDecoder, config, decoder, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.config.tables import ModelConfig
from forge_core.errors import ForgeError
from forge_core.model import RMSNorm, attend, build_decoder, build_norm, default_parts, initialise
from forge_core.model.dimensions import slides
from forge_core.model.flops import flops_per_token
from forge_core.model.generate import generate
from forge_core.model.masks import AttentionMasks, DocumentRuns, VarlenRuns
from forge_core.testing import tiny_config

GEMMA2: dict[str, Any] = {
    "norm_unit_offset": True,
    "block_norm": "sandwich",
    "attention_scale": 0.3,
    "attention_softcap": 2.0,
    "logit_softcap": 3.0,
    "embedding_scale": 4.0,
    "activation": "gelu_tanh",
    "sliding_window": 4,
    "layer_types": ["sliding", "full"],
}
OLMO2: dict[str, Any] = {"block_norm": "post", "qk_norm": True, "qk_norm_over": "all_heads"}
GEMMA3: dict[str, Any] = {
    "norm_unit_offset": True,
    "block_norm": "sandwich",
    "qk_norm": True,
    "sliding_window": 3,
    "layer_types": ["sliding", "full"],
    "rope_theta": 500.0,
    "rope_theta_sliding": 20.0,
    "rope_scaling": None,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "unit offset": {"norm_unit_offset": True},
    "unit offset, layernorm": {"norm_unit_offset": True, "norm_type": "layernorm"},
    "post": {"block_norm": "post"},
    "sandwich": {"block_norm": "sandwich"},
    "one norm over all heads": {"qk_norm": True, "qk_norm_over": "all_heads"},
    "scale": {"attention_scale": 0.7},
    "softcap of scores": {"attention_softcap": 0.5},
    "softcap of logits": {"logit_softcap": 0.5},
    "embedding scale": {"embedding_scale": 4.0},
    "all slide": {"sliding_window": 3},
    "window of one": {"sliding_window": 1},
    "window and full": {"sliding_window": 3, "layer_types": ["sliding", "full"]},
    "own base": {"sliding_window": 3, "layer_types": ["full", "sliding"], "rope_theta_sliding": 20.0},
    "gemma 2": GEMMA2,
    "olmo 2": OLMO2,
    "gemma 3": {name: value for name, value in GEMMA3.items() if value is not None},
}


class PlainFamily(PlainDecoder):
    """`PlainDecoder` with the options above, written out."""

    def logits(self, row: Tensor, see: Tensor | None = None, positions: list[int] | None = None) -> Tensor:
        m, n = self.model, len(row)
        causal = torch.ones(n, n, dtype=torch.bool).tril() if see is None else see
        places = list(range(n)) if positions is None else positions
        x = self.weights["embed.weight"][row] * m.embedding_scale
        theta = m.rope_theta
        for i in range(m.n_layers):
            near = torch.tensor([[q - k < (m.sliding_window or n) for k in range(n)] for q in range(n)])
            types = m.layer_types or ["sliding" if m.sliding_window else "full"]
            sliding = types[i % len(types)] == "sliding"
            self.base = (m.rope_theta_sliding or theta) if sliding else theta
            self.i, mask = i, causal & near if sliding else causal
            x = x + self.part(
                "attn", x, lambda h, mask=mask, i=i: self.attention(h, f"layers.{i}.attn.", mask, places)
            )  # type: ignore[misc]
            x = x + self.part("mlp", x, lambda h, i=i: self.mlp(h, f"layers.{i}.mlp."))  # type: ignore[misc]
        head = "embed.weight" if m.tie_embeddings else "head.weight"
        logits = self.norm(x, "norm") @ self.weights[head].T
        return logits if m.logit_softcap is None else m.logit_softcap * torch.tanh(logits / m.logit_softcap)

    def part(self, name: str, x: Tensor, run: Any) -> Tensor:
        h = x if self.model.block_norm == "post" else self.norm(x, f"layers.{self.i}.{name}_norm")
        y: Tensor = run(h)
        if self.model.block_norm != "pre":
            y = self.norm(y, f"layers.{self.i}.{name}_post_norm")
        return y

    def norm(self, x: Tensor, name: str, kind: str | None = None) -> Tensor:
        if not self.model.norm_unit_offset:
            return super().norm(x, name, kind)
        plain = self.weights[f"{name}.weight"]
        self.weights[f"{name}.weight"] = plain + 1
        y = super().norm(x, name, kind)
        self.weights[f"{name}.weight"] = plain
        return y

    def turned(self, x: Tensor, places: list[int]) -> Tensor:
        width, y = x.shape[1], x.clone()
        for s, place in enumerate(places):
            for pair in range(width // 2):
                angle = place * self.base ** (-2 * pair / width)
                a, b = x[s, pair], x[s, pair + width // 2]
                y[s, pair] = a * math.cos(angle) - b * math.sin(angle)
                y[s, pair + width // 2] = b * math.cos(angle) + a * math.sin(angle)
        return y

    def attention(self, h: Tensor, name: str, see: Tensor, places: list[int]) -> Tensor:
        m, width, group = self.model, self.d.head_dim, self.d.n_heads // self.d.n_kv_heads
        q, k, v = (self.linear(h, f"{name}{which}_proj") for which in "qkv")
        whole = m.qk_norm and m.qk_norm_over == "all_heads"
        if whole:
            q, k = self.norm(q, f"{name}q_norm", "rmsnorm"), self.norm(k, f"{name}k_norm", "rmsnorm")
        heads = []
        for head in range(self.d.n_heads):
            shared = slice(head // group * width, (head // group + 1) * width)
            query, key = q[:, head * width : (head + 1) * width], k[:, shared]
            if m.qk_norm and not whole:
                query = self.norm(query, f"{name}q_norm", "rmsnorm")
                key = self.norm(key, f"{name}k_norm", "rmsnorm")
            scores = self.turned(query, places) @ self.turned(key, places).T
            scores = scores * (m.attention_scale or 1 / math.sqrt(width))
            if m.attention_softcap:
                scores = m.attention_softcap * torch.tanh(scores / m.attention_softcap)
            heads.append(scores.masked_fill(~see, -math.inf).softmax(-1) @ v[:, shared])
        return self.linear(torch.cat(heads, -1), f"{name}o_proj")


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_a_decoder_of_plain_loops(variant: str) -> None:
    model = config(**VARIANTS[variant])
    built = decoder(model, torch.float64)
    plain = PlainFamily(model, built.state_dict())
    batch = tokens(2, 9)
    logits = built.logits(built(batch))
    for row in range(2):
        torch.testing.assert_close(logits[row], plain.logits(batch[row]), rtol=1e-10, atol=1e-10)
    changed = VARIANTS[variant].keys() - {"block_norm", "qk_norm_over", "qk_norm", "rope_scaling"}
    if changed:
        neutral = {"norm_unit_offset": False, "embedding_scale": 1.0, "layer_types": [], "activation": "silu"}
        without = {name: neutral.get(name) for name in changed if name not in ("norm_type", "rope_theta")}
        bare = PlainFamily(config(**{**VARIANTS[variant], **without}), built.state_dict())
        assert (bare.logits(batch[0]) - logits[0]).abs().max() > 1e-4, "the options would change nothing"


@pytest.mark.parametrize("variant", ["all slide", "gemma 2", "olmo 2", "gemma 3"])
@pytest.mark.parametrize("strategy", ["mask", "documents"])
def test_packed_documents_equal_separate_ones(variant: str, strategy: str) -> None:
    built = decoder(config(**{**VARIANTS[variant], "attention": strategy}), torch.float64)
    batch, documents = tokens(2, 13), torch.tensor([[0] * 4 + [1] * 9] * 2, dtype=torch.int32)
    packed = built.logits(built(batch, documents=documents))
    separate = torch.cat([built.logits(built(batch[:, :4])), built.logits(built(batch[:, 4:]))], 1)
    torch.testing.assert_close(packed, separate, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", ["all slide", "gemma 2", "olmo 2", "gemma 3"])
def test_generation_with_a_cache_equals_generation_without(variant: str) -> None:
    """Greedy, rows of several lengths, past the window; against the whole forward again at each token."""
    built = decoder(config(**VARIANTS[variant]), torch.float64)
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (7, 2, 5)]
    rows = generate(built, prompts, max_new_tokens=8, temperature=0)
    in_pieces = generate(built, prompts, max_new_tokens=8, temperature=0, prefill_chunk=2)
    assert in_pieces == rows
    for prompt, row in zip(prompts, rows, strict=True):
        so_far = list(prompt)
        with torch.no_grad():
            for _ in range(8):
                so_far.append(int(built.logits(built(torch.tensor([so_far]))[:, -1]).argmax()))
        assert row == so_far[len(prompt) :]


@pytest.mark.parametrize("variant", ["gemma 2", "olmo 2", "gemma 3"])
def test_gradients_equal_those_of_plain_loops(variant: str) -> None:
    model = config(**VARIANTS[variant])
    built = decoder(model, torch.float64)
    weights = {name: p.detach().clone().requires_grad_() for name, p in built.named_parameters()}
    plain = PlainFamily(model, {})
    plain.weights = weights
    batch = tokens(1, 7)
    target = torch.randn(7, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (built.logits(built(batch))[0] * target).sum().backward()
    names = list(weights)
    loss = (plain.logits(batch[0]) * target).sum()
    for name, gradient in zip(names, torch.autograd.grad(loss, list(weights.values())), strict=True):
        torch.testing.assert_close(built.get_parameter(name).grad, gradient, rtol=1e-9, atol=1e-10, msg=name)


# torch reads .grad of activations while tracing and hides its own warning; an error filter would raise it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("variant", ["gemma 2", "olmo 2"])
def test_compiled_blocks_equal_eager_ones(variant: str) -> None:
    torch._dynamo.reset()
    eager, compiled = (decoder(config(**VARIANTS[variant])) for _ in range(2))
    for block in compiled.layers.values():
        block.compile(backend="aot_eager")
    batch, documents = tokens(2, 12), torch.tensor([[0] * 4 + [1] * 8] * 2, dtype=torch.int32)
    for inputs in ({}, {"documents": documents}):
        torch.testing.assert_close(compiled(batch, **inputs), eager(batch, **inputs), rtol=1e-5, atol=1e-6)


def test_a_token_beyond_the_window_is_seen_by_no_layer() -> None:
    """Two layers that see 3 tokens reach 2 * (3 - 1) = 4 back: token 0 moves positions 0 to 4 alone."""
    built = decoder(config(sliding_window=3), torch.float64)
    batch = tokens(1, 9)
    other = batch.clone()
    other[0, 0] = (batch[0, 0] + 1) % 13
    moved = (built(batch) - built(other)).abs().amax(-1)[0] > 1e-9
    assert moved.tolist() == [True] * 5 + [False] * 4


def test_short_sequences_take_the_kernel_of_a_model_without_window() -> None:
    built = decoder(config(sliding_window=9))
    assert built.context(torch.zeros(1, 9, 16), sliding=True).mask is None
    assert built.context(torch.zeros(1, 10, 16), sliding=True).mask.shape == (1, 1, 10, 10)
    documents = torch.tensor([[0] * 40 + [1] * 40], dtype=torch.int32)
    long = decoder(config(sliding_window=39, max_seq_len=80))
    context = long.context(torch.zeros(1, 80, 16), documents=documents, sliding=True)
    assert context.mask == DocumentRuns((40, 40), 39)
    assert long.context(torch.zeros(1, 80, 16), documents=documents).mask == DocumentRuns((40, 40))


def test_the_varlen_kernel_is_told_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def kernel(q: Tensor, *args: Any, **options: Any) -> Tensor:
        seen.update(options)
        return torch.zeros_like(q)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    q = torch.zeros(1, 2, 6, 8)
    runs = VarlenRuns(torch.tensor([0, 6], dtype=torch.int32), 6, 4)
    attend(q, q, q, runs, scale=0.5)
    assert seen == {"enable_gqa": False, "scale": 0.5, "window_size": (3, 0)}
    with pytest.raises(ForgeError, match="cannot cap"):
        attend(q, q, q, runs, softcap=1.0)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("variant", ["all slide", "gemma 2", "gemma 3"])
@pytest.mark.parametrize("packed", [True, False])
def test_flex_attention_gives_the_same(variant: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The strategy of a CUDA device, on a CPU: windows in its mask, caps in its scores."""
    documents = torch.tensor([[0] * 4 + [1] * 9] * 2, dtype=torch.int32) if packed else None
    batch = tokens(2, 13)
    with torch.no_grad():
        plain = decoder(config(**VARIANTS[variant], attention="mask"))(batch, documents=documents)
        monkeypatch.setattr(AttentionMasks, "_on_device", lambda self, x: self.strategy)
        flex = decoder(config(**VARIANTS[variant], attention="flex"))(batch, documents=documents)
    torch.testing.assert_close(flex, plain, rtol=1e-4, atol=1e-5)


def test_capped_scores_by_hand() -> None:
    """One query of two keys: scores 0 and 4, capped at 2: 0 and 2 tanh(2) = 1.928; values 0 and 1."""
    q, k = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    v = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    q, k, v = (x[None, None].double() for x in (q, k, v))
    y = attend(q, k, v, scale=1.0, softcap=2.0)[0, 0, 1, 0]
    assert float(y) == pytest.approx(1 / (1 + math.exp(-2 * math.tanh(2))))


def test_norms_with_an_offset_start_as_identity() -> None:
    model = config(norm_unit_offset=True, qk_norm=True)
    built = build_decoder(model, default_parts(model))
    initialise(built, 0, 0.1, 2)
    norms = [m for m in built.modules() if isinstance(m, RMSNorm)]
    assert len(norms) == 2 * 4 + 1
    assert all(not norm.weight.any() for norm in norms)
    x = torch.randn(3, 16)
    plain = build_norm(config(), 16)
    torch.testing.assert_close(built.norm(x), plain(x), rtol=0, atol=0)  # type: ignore[misc]


def test_an_offset_is_added_in_fp32() -> None:
    """bf16 has 8 bits: 1 + 2**-9 would be 1."""
    norm = RMSNorm(4, 1e-6, unit_offset=True).bfloat16()
    norm.weight.data.fill_(2**-9)
    x = torch.tensor([3.0, 1.0, 2.0, 5.0]).bfloat16()
    exact = torch.nn.functional.rms_norm(x.float(), (4,), torch.full((4,), 1 + 2**-9), 1e-6)
    assert torch.equal(norm(x), exact.bfloat16())


def test_the_pattern_repeats() -> None:
    model = config(n_layers=5, sliding_window=4, layer_types=["sliding", "sliding", "full"])
    assert [slides(model, i) for i in range(5)] == [True, True, False, True, True]
    assert [slides(config(sliding_window=4), i) for i in range(2)] == [True, True]
    assert not slides(config(), 0)


def test_flops_of_a_window() -> None:
    """8 tokens of 2 keys: 1 + 7 * 2 = 15 pairs of the exact 36; the formula's half of 8 is 2 - 4/16."""
    full, all_slide = config(), config(sliding_window=2)
    half = config(sliding_window=2, layer_types=["sliding", "full"])
    a_layer = 12 * 4 * 8 * 8 / 2
    base = flops_per_token(full, 8) - 2 * a_layer
    assert flops_per_token(all_slide, 8) - base == pytest.approx(2 * a_layer * (2 - 4 / 16) / 4)
    assert flops_per_token(half, 8) - base == pytest.approx(a_layer * (1 + (2 - 4 / 16) / 4))
    assert flops_per_token(all_slide, 2) == flops_per_token(full, 2)


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"layer_types": ["sliding"]}, "layer_types"),
        ({"sliding_window": 4, "layer_types": ["full"]}, "sliding_window"),
        ({"rope_theta_sliding": 10.0}, "rope_theta_sliding"),
        ({"layer_types": ["full"] * 3}, "layer_types"),
        ({"qk_norm_over": "all_heads"}, "qk_norm_over"),
        ({"attention_softcap": 5.0, "attention": "varlen"}, "attention"),
    ],
)
def test_what_does_not_go_together_is_refused(keys: dict[str, Any], path: str) -> None:
    assert path in [problem.path for problem in config(**keys).problems()]


def test_a_run_with_every_option_trains() -> None:
    from forge_core.testing import run_tiny

    keys = {**GEMMA2, "qk_norm": True, "qk_norm_over": "all_heads"}
    run = run_tiny(tiny_config(model=keys, train={"max_steps": 12}, optimizer={"lr": 3e-2}))
    assert run.status == 0
    assert run.losses[-1] < run.losses[0] < 4.3  # of 64 tokens: ln 64 = 4.16


class Reads(TorchDispatchMode):
    """Counts reads of tensors by the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        self.count += func in (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def test_an_update_with_every_option_reads_nothing_back() -> None:
    from forge_core.testing import tiny_session

    keys = {**GEMMA2, "qk_norm": True, "qk_norm_over": "all_heads", "rope_theta_sliding": 50.0}
    with tiny_session(tiny_config(model=keys)) as session:
        session.step_fn.train(session, 1)
        with Reads() as reads:
            session.step_fn.train(session, 2)
    assert reads.count == 0


def test_the_loss_of_a_run_is_that_of_the_capped_logits() -> None:
    from forge_core.testing import tiny_session

    with tiny_session(tiny_config(model={"logit_softcap": 0.1, "init_std": 0.5})) as session:
        batch = session.stream.take(1)[0]
        output = session.forward(session.model, batch)
        model: Any = session.model
        logits = model.logits(model(batch["tokens"]))
        assert float(logits.detach().abs().max()) <= 0.1 + 1e-8
        expected = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum", ignore_index=-100
        )
        torch.testing.assert_close(output.loss_sum, expected)


def test_defaults_say_nothing_of_families() -> None:
    """A default decoder has the parameters it always had, in their order."""
    names = [name for name, _ in decoder(config(n_layers=1)).named_parameters()]
    parts = ["attn_norm", *(f"attn.{x}_proj" for x in "qkvo"), "mlp_norm"]
    parts += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    assert names == ["embed.weight", *(f"layers.0.{p}.weight" for p in parts), "norm.weight", "head.weight"]
    assert ModelConfig().block_norm == "pre"
