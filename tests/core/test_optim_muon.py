"""Muon against torch.optim.Muon, singular values and plain slices."""

from __future__ import annotations

import pytest
import torch
from optimkit import built, give_gradients, random
from torch import Tensor, nn

from forge_core.optim import (
    guarded_step,
)
from forge_core.optim.muon import Muon, orthogonalise
from forge_core.optim.options import AdamWOptions, MuonOptions


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (32, 8), (3, 12, 20)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_orthogonalised_singular_values(shape: tuple[int, ...], scale: float) -> None:
    result = orthogonalise(random(*shape) * scale, 5, torch.float32)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.65
    assert values.max() < 1.25
    assert torch.equal(result, orthogonalise(random(*shape) * scale, 5, torch.float32))


def test_orthogonalising_keeps_singular_vectors() -> None:
    matrix = random(6, 10, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.mT @ orthogonalise(matrix, 5, torch.float64) @ vh.mT
    torch.testing.assert_close(inner, torch.diag(torch.diag(inner)), atol=1e-12, rtol=0)


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_muon_is_torch_muon(rule: str, nesterov: bool, shape: tuple[int, int]) -> None:
    p, q = nn.Parameter(random(*shape)), nn.Parameter(random(*shape))
    groups = [{"params": [p], "kind": "matrix"}]
    ours = Muon(groups, lr=0.02, weight_decay=0.1, nesterov=nesterov, ns_dtype="bf16", scale=rule)
    torchs = torch.optim.Muon([q], lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=rule)
    for update in range(5):
        give_gradients([p], update)
        give_gradients([q], update)
        guarded_step(ours, torch.tensor(True))
        torchs.step()
    torch.testing.assert_close(ours.state[p]["momentum_buffer"], torchs.state[q]["momentum_buffer"])
    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_muon_gives_all_other_parameters_to_adamw() -> None:
    model, muon = built("muon", MuonOptions(), lr=0.02)
    twin, adamw = built("adamw", AdamWOptions(), lr=0.02)
    for update in range(3):
        give_gradients(model.parameters(), update)
        give_gradients(twin.parameters(), update)
        muon.step()
        adamw.step()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q) == (name != "hidden.weight")
    assert set(muon.state[model.hidden.weight]) == {"momentum_buffer"}
    assert set(muon.state[model.head.weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_muon_has_one_learning_rate_for_matrices_and_one_for_the_rest() -> None:
    _, optimizer = built("muon", MuonOptions(adam_lr=0.001), lr=0.02)
    rates = {g["kind"]: (g["initial_lr"], g["lr"]) for g in optimizer.param_groups}
    assert rates["matrix"] == (0.02, 0.02)
    assert rates["other"] == pytest.approx((0.001, 0.001))


def test_muon_flattens_kernels_and_takes_stacks_matrix_by_matrix() -> None:
    kernel, flat = nn.Parameter(torch.zeros(4, 3, 2)), nn.Parameter(torch.zeros(4, 6))
    stack, slices = nn.Parameter(torch.zeros(2, 4, 3)), [nn.Parameter(torch.zeros(4, 3)) for _ in range(2)]
    kernel.grad = random(4, 3, 2)
    flat.grad = kernel.grad.reshape(4, 6).clone()
    stack.grad = random(2, 4, 3)
    for i in range(2):
        slices[i].grad = stack.grad[i].clone()
    groups = [{"params": [kernel, flat, *slices], "kind": "matrix"}, {"params": [stack], "kind": "matrices"}]
    Muon(groups, lr=1.0).step()
    torch.testing.assert_close(kernel.reshape(4, 6), flat)
    torch.testing.assert_close(stack, torch.stack(list(slices)))
    assert flat.abs().sum() > 0


def test_muon_iterates_in_the_precision_of_fp64_parameters() -> None:
    def update(dtype: torch.dtype) -> Tensor:
        p = nn.Parameter(torch.zeros(6, 6, dtype=dtype))
        p.grad = random(6, 6, dtype=torch.float64).to(dtype)
        Muon([{"params": [p], "kind": "matrix"}], lr=1.0).step()
        return p.detach().double()

    gap = (update(torch.float64) - update(torch.float32)).abs().max()
    assert 0 < gap < 1e-5
