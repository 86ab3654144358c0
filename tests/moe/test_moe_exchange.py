"""Tokens travel to experts on other ranks, whatever the routes: none, all, from some ranks only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from moekit import context, layer
from torch import Tensor, nn

from forge_core.testing.pool import WorkerPool
from forge_moe.ffn import MoeFFN
from forge_moe.ranks import ExpertRanks

RATE = 0.01


def forced(expert: int | None) -> MoeFFN:
    """4 experts, top-1; all tokens to `expert`, or by their first number to 0 and 1 (+) or 2 and 3 (-)."""
    ffn = layer(top_k=1, options={"renormalise": False})
    with torch.no_grad():
        ffn.router.weight.mul_(0.1)
        if expert is not None:
            ffn.router.weight[expert, 0] = 10.0
    return ffn


def tokens(rows: tuple[int, int]) -> list[Tensor]:
    """The rows of each of two ranks, (rows, 4, 8), whose first number is 1."""
    x = torch.randn(sum(rows), 4, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x[..., 0] = 1.0
    return list(x.split(list(rows)))


def divided(ffn: MoeFFN) -> MoeFFN:
    """The layer with this rank's experts alone."""
    group = dist.group.WORLD
    assert group is not None
    for name, parameter in list(ffn.experts.named_parameters()):
        mine = parameter.detach().chunk(group.size())[group.rank()].clone()
        ffn.experts.register_parameter(name, nn.Parameter(mine))
    ffn.ranks = ExpertRanks(experts=group)
    return ffn


def train(ffn: MoeFFN, x: Tensor, shared: bool) -> dict[str, Any]:
    """Three updates by SGD on the sum of squares; gradients of what ranks share are summed."""
    outputs, norms = [], []
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        out = ffn(leaf, context())
        out.square().sum().backward()
        assert leaf.grad is not None
        outputs.append(out.detach())
        for name, parameter in ffn.named_parameters():
            assert parameter.grad is not None
            if shared and not name.startswith("experts"):
                dist.all_reduce(parameter.grad)
            assert parameter.grad.isfinite().all()
        norms.append({name: float(p.grad.norm()) for name, p in ffn.named_parameters() if p.grad is not None})
        with torch.no_grad():
            for parameter in ffn.parameters():
                assert parameter.grad is not None
                parameter -= RATE * parameter.grad
                parameter.grad = None
    weights = {name: p.detach().clone() for name, p in ffn.named_parameters()}
    return {"outputs": outputs, "weights": weights, "by_input": leaf.grad, "norms": norms}


def on_rank(expert: int | None, rows: tuple[int, int]) -> dict[str, Any]:
    return train(divided(forced(expert)), tokens(rows)[dist.get_rank()], True)


@pytest.mark.parametrize("expert", [0, 3, None])
@pytest.mark.parametrize("rows", [(2, 2), (4, 0)])
def test_updates_are_those_of_one_process(
    pool2: WorkerPool, expert: int | None, rows: tuple[int, int]
) -> None:
    expected = train(forced(expert), torch.cat(tokens(rows)), False)
    found = pool2.run(on_rank, expert, rows)
    for step, whole in enumerate(expected["outputs"]):
        torch.testing.assert_close(torch.cat([each["outputs"][step] for each in found]), whole)
    torch.testing.assert_close(torch.cat([each["by_input"] for each in found]), expected["by_input"])
    start = dict(forced(expert).named_parameters())
    for name, weight in expected["weights"].items():
        parts = [each["weights"][name] for each in found]
        if not name.startswith("experts"):
            assert parts[0].equal(parts[1])
            torch.testing.assert_close(parts[0], weight)
            for step, norms in enumerate(expected["norms"]):
                assert found[0]["norms"][step][name] == pytest.approx(norms[name], rel=1e-10)
            continue
        together = torch.cat(parts)
        torch.testing.assert_close(together, weight)
        for idle in range(4) if expert is not None else ():
            assert together[idle].equal(start[name][idle]) == (idle != expert)


def accumulated(recompute: bool) -> Tensor:
    """Counts of an update on this rank: two micro-batches of 10 tokens."""
    from torch.utils.checkpoint import checkpoint

    ffn = divided(forced(None))
    for number in range(2):
        x = torch.randn(1, 10, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        x.requires_grad_()
        around = context()
        out = checkpoint(ffn, x, around, use_reentrant=False) if recompute else ffn(x, around)
        assert isinstance(out, Tensor)
        out.sum().backward()
    total = ffn.tally[:4].clone()
    dist.all_reduce(total)
    return total


def test_counts_of_an_update_over_two_ranks(pool2: WorkerPool) -> None:
    """10 tokens, top-1, two micro-batches, two ranks: 40, with and without recomputation, on both ranks."""
    kept, computed = pool2.run(accumulated, False), pool2.run(accumulated, True)
    assert all(counts.sum() == 40 for counts in kept)
    for counts in (*kept, *computed):
        assert counts.equal(kept[0])
