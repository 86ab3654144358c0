"""A layer of experts beside a plain loop over tokens, and what must not change it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moekit import NO_LOSSES, context, expert, layer, plain, router
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forge_moe.balance import Balance
from forge_moe.experts import gradient_scale
from forge_moe.grouped import grouped_linear, uses_grouped
from forge_moe.table import MoeConfig

# torch warns of its own tracing
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def inputs(
    rows: int = 2, length: int = 5, dim: int = 8, seed: int = 1, dtype: torch.dtype = torch.float64
) -> Tensor:
    return torch.randn(rows, length, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def routes(ffn: Any, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    routing = ffn.router(x.reshape(-1, x.shape[-1]), None if valid is None else valid.reshape(-1))
    k = ffn.moe.top_k
    return routing.expert.view(-1, k), routing.weight.view(-1, k)


@pytest.mark.parametrize(("kind", "biased"), [("softmax", False), ("sigmoid", False), ("softmax", True)])
def test_a_layer_is_a_loop_over_tokens(kind: str, biased: bool) -> None:
    ffn, x = layer(kind, biased=biased, num_experts=5), inputs().requires_grad_()
    out = ffn(x, context())
    chosen, weights = routes(ffn, x)
    wanted = plain(ffn, x, chosen, weights)
    torch.testing.assert_close(out, wanted)
    pull = torch.randn_like(out)
    found = torch.autograd.grad(out, [x, *ffn.parameters()], pull)
    for one, other in zip(found, torch.autograd.grad(wanted, [x, *ffn.parameters()], pull), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("biased", [False, True])
def test_tokens_of_no_expert_get_nothing(biased: bool) -> None:
    ffn, x = layer(biased=biased), inputs()
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[0, 3:] = False
    out = ffn(x, context(valid))
    assert not out[~valid].any()
    chosen, weights = routes(ffn, x)
    torch.testing.assert_close(out[valid], plain(ffn, x, chosen, weights)[valid])


def test_shared_experts_see_every_token() -> None:
    ffn, x = layer(shared_experts=2, shared_hidden_dim=24, shared_gate=True), inputs()
    assert ffn.shared is not None
    assert ffn.shared_gate is not None
    assert ffn.shared.up_proj.weight.shape == (24, 8)
    chosen, weights = routes(ffn, x)
    always = ffn.shared(x, context()) * torch.sigmoid(x @ ffn.shared_gate.weight.T)
    torch.testing.assert_close(ffn(x, context()), plain(ffn, x, chosen, weights) + always)


def test_experts_that_choose_are_a_loop_over_what_they_took() -> None:
    ffn, x = layer("expert_choice"), inputs().requires_grad_()
    flat = x.view(-1, 8)
    routing = ffn.router(flat)
    assert routing.token is not None
    rows = [torch.zeros(8, dtype=x.dtype)] * len(flat)
    for e, t, w in zip(routing.expert.tolist(), routing.token.tolist(), routing.weight, strict=True):
        rows[t] = rows[t] + w * expert(ffn, e, flat[t])
    wanted = torch.stack(rows).view(x.shape)
    out = ffn(x, context())
    torch.testing.assert_close(out, wanted)
    pull = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, x, pull), torch.autograd.grad(wanted, x, pull))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_grouped_kernel_and_the_loop_give_the_same(dtype: torch.dtype, tolerance: float) -> None:
    """With an empty group, and rows of no group whose memory is anything."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(4, 16, 8, generator=generator).to(dtype).requires_grad_()
    ends = torch.tensor([3, 3, 7, 9], dtype=torch.int32)
    pull = torch.randn(12, 16, generator=generator).to(dtype)
    found = {}
    for kernel in ("loop", "grouped"):
        out = grouped_linear(x, weight, ends, kernel)
        found[kernel] = [out, *torch.autograd.grad(out, [x, weight], pull)]
    for one, other in zip(found["loop"], found["grouped"], strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=tolerance, rtol=tolerance)
    out, by_x, by_weight = found["grouped"]
    assert not out[9:].any()
    assert not by_x[9:].any()
    assert not by_weight[1].any()
    assert not by_weight.isnan().any()


def test_which_kernel_is_taken() -> None:
    fits, narrow = torch.empty(4, 8), torch.empty(4, 6)
    assert uses_grouped("auto", fits)
    assert not uses_grouped("auto", narrow)  # 24 bytes a row
    assert not uses_grouped("auto", fits.double())
    assert not uses_grouped("loop", fits)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "expert_choice"])
def test_padding_has_no_effect(kind: str) -> None:
    """Neither on real tokens, nor on counts, nor on any gradient, whatever it holds."""
    ffn, real = layer(kind), inputs(1, 6)
    valid = torch.tensor([[True] * 6 + [False] * 3])
    results = []
    for filling in (None, 0.0, 7.0):
        padding = real.new_full((1, 3, 8), filling or 0.0)
        x = real if filling is None else torch.cat([real, padding], 1)
        ffn.tally.zero_()
        ffn.zero_grad()
        out = ffn(x, context(None if filling is None else valid))
        out.square().sum().backward()
        assert filling is None or not out[:, 6:].any()
        grads = [p.grad.clone() for p in ffn.parameters() if p.grad is not None]
        results.append([out[:, :6].detach(), ffn.tally.clone(), *grads])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two)


def forced(expert_index: int, **moe: Any) -> Any:
    """A layer of 4 experts and top-1 whose router sends all tokens with a positive first number to one."""
    ffn = layer(top_k=1, **moe)
    with torch.no_grad():
        ffn.router.weight.zero_()
        ffn.router.weight[expert_index, 0] = 10.0
    return ffn


def test_experts_without_tokens_keep_still() -> None:
    ffn, x = forced(0), inputs()
    x[..., 0] = 1.0
    before = [p.detach().clone() for p in ffn.experts.parameters()]
    optimizer = torch.optim.SGD(ffn.parameters(), lr=0.1)
    for _ in range(3):
        ffn(x, context()).square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in ffn.parameters())
        optimizer.step()
        optimizer.zero_grad()
    for old, new in zip(before, ffn.experts.parameters(), strict=True):
        assert new[1:].equal(old[1:])
        assert not new[0].equal(old[0])


def test_no_tokens_at_all() -> None:
    ffn, x = layer(), inputs(0, 5).requires_grad_()
    out = ffn(x, context())
    out.sum().backward()
    assert out.shape == (0, 5, 8)
    assert all(p.grad is not None and not p.grad.any() for p in ffn.parameters())


def test_dropped_tokens_get_nothing() -> None:
    """5 tokens to one of 4 experts at factor 1: it takes 2, in order; 3 are dropped and counted."""
    ffn, x = forced(0, capacity_factor=1.0), inputs(1, 5)
    x[..., 0] = 1.0
    out = ffn(x, context())
    assert out[0, :2].abs().amin() > 0
    assert not out[0, 2:].any()
    assert ffn.tally.tolist()[:6] == [5, 0, 0, 0, 5, 3]
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ffn.parameters())
    assert forced(0)(x, context()).abs().amin() > 0


def test_a_capacity_beyond_the_tokens_drops_nothing() -> None:
    wide, free, x = (
        layer(num_experts=2, top_k=1, capacity_factor=8.0),
        layer(num_experts=2, top_k=1),
        inputs(1, 5),
    )
    assert wide(x, context()).equal(free(x, context()))


def test_recomputation_counts_nothing_twice() -> None:
    """10 tokens, two forwards: 20 assignments of top-1, with and without it."""
    tallies = []
    for recompute in (False, True):
        ffn, x = layer(top_k=1), inputs().requires_grad_()
        for _ in range(2):
            if recompute:
                out = checkpoint(lambda y, f=ffn: f(y, context()), x, use_reentrant=False)
            else:
                out = ffn(x, context())
            assert isinstance(out, Tensor)
            out.sum().backward()
        tallies.append(ffn.tally.clone())
    assert tallies[0][:4].sum() == 20
    assert tallies[0].equal(tallies[1])


def test_evaluation_counts_nothing() -> None:
    ffn = layer()
    with torch.no_grad():
        ffn(inputs(), context())
    ffn.eval()(inputs(), context())
    assert not ffn.tally.any()


def test_gradient_scaling_leaves_the_forward_alone() -> None:
    """Counts 30, 10, 0, 0 of mean 10: factors 1/3, 1, and 8 at most."""
    ffn, x = layer(gradient_scaling=True), inputs()
    same = layer()
    assert ffn.experts.scale is not None
    ffn.experts.scale.copy_(gradient_scale(torch.tensor([30.0, 10, 0, 0])))
    torch.testing.assert_close(ffn.experts.scale, torch.tensor([1 / 3, 1, 8, 8], dtype=torch.float64))
    outs = [f(x, context()) for f in (ffn, same)]
    assert outs[0].equal(outs[1])
    assert ffn.eval()(x, context()).equal(outs[0])
    ffn.train()
    for out in outs:
        out.square().sum().backward()
    for (name, p), q in zip(ffn.named_parameters(), same.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        factor = ffn.experts.scale[:, None, None] if name.startswith("experts") else 1.0
        torch.testing.assert_close(p.grad, q.grad * factor)


def test_the_bias_moves_by_the_rate_of_its_schedule() -> None:
    """Counts 6, 2, 2, 2 of mean 3: signs -, +, +, +. Cosine over two updates: half the rate, then nothing;
    a warm-up over the first tenth of 20: half in update 1, all in update 2."""
    signs = torch.tensor([-1.0, 1, 1, 1], dtype=torch.float64)
    for schedule, steps, factors in (("cosine", 2, (0.5, 0.0)), ("linear_warmup", 20, (0.5, 1.0))):
        ffn = layer(bias=True)
        table = MoeConfig(num_experts=4, bias_rate=0.1, bias_schedule=schedule)
        balance = Balance({"layers.0.mlp": ffn}, table, max_steps=steps)
        for number, factor in enumerate(factors, 1):
            before = ffn.router.expert_bias.clone()
            ffn.tally[:4] = torch.tensor([6.0, 2, 2, 2])
            balance.after_update(number, torch.tensor(True))
            torch.testing.assert_close(ffn.router.expert_bias - before, 0.1 * factor * signs)


def test_memory_does_not_grow_with_the_busiest_expert() -> None:
    """Rows that experts see: one for each assignment, also where one expert gets all of them."""
    seen = []
    for ffn in (layer(), forced(0)):
        x = inputs()
        x[..., 0] = 1.0
        ffn.experts.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
        ffn(x, context())
    assert seen == [20, 10]


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_a_compiled_layer_is_the_same(kind: str) -> None:
    ffn, x, around = layer(kind, dtype=torch.float32), inputs(dtype=torch.float32), context()
    compiled = torch.compile(lambda y: ffn(y, around), backend="aot_eager", fullgraph=True)
    results = []
    for run in (lambda y: ffn(y, around), compiled):
        ffn.zero_grad()
        ffn.tally.zero_()
        out = run(x)
        out.square().sum().backward()
        results.append([out.detach(), ffn.tally.clone(), *(p.grad.clone() for p in ffn.parameters())])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


def test_experts_that_choose_see_what_comes_later() -> None:
    """Why a configuration has to accept it: changing the last token changes what the first ones get."""
    made = router("expert_choice", 2, 1)
    with torch.no_grad():
        made.weight.copy_(torch.eye(2))
    ffn = layer("expert_choice", num_experts=2, top_k=1)
    x = inputs(1, 8)
    before = ffn(x, context())
    changed = x.clone()
    changed[0, 7] *= -20
    assert not torch.allclose(ffn(changed, context())[0, :7], before[0, :7])
    free = layer("softmax", num_experts=2, top_k=1, **NO_LOSSES)
    torch.testing.assert_close(free(changed, context())[0, :7], free(x, context())[0, :7])
