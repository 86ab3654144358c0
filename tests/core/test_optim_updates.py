"""Updates of AdamW and Lion against a plain reference and numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from optimkit import built, give_gradients
from torch import nn

from forge_core.config.tables import OptimizerConfig
from forge_core.optim import (
    build_optimizer,
    guarded_step,
    parameter_groups,
    skips_on_device,
)
from forge_core.optim.lion import Lion
from forge_core.optim.options import AdamWOptions
from forge_core.testing.optimizers import ROLES


def test_adamw_is_torch_adamw() -> None:
    model, optimizer = built("adamw", AdamWOptions(), lr=0.01, weight_decay=0.0)
    plain = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    reference = torch.optim.AdamW(plain, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    for update in range(4):
        give_gradients(model.parameters(), update)
        give_gradients(plain, update)
        guarded_step(optimizer, torch.tensor(True))
        reference.step()
    for p, expected in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_adamw_is_fused_for_floating_point_on_a_cpu(dtype: torch.dtype) -> None:
    config = OptimizerConfig()
    groups = parameter_groups([("w", nn.Parameter(torch.ones(2, 2, dtype=dtype)))], {}, config, {})
    optimizer = build_optimizer(config, AdamWOptions(), groups)
    assert optimizer.param_groups[0]["fused"]
    assert skips_on_device(optimizer)


def test_adamw_falls_back_where_there_is_no_kernel(caplog: pytest.LogCaptureFixture) -> None:
    config = OptimizerConfig()
    groups = parameter_groups([("w", nn.Parameter(torch.ones(2, 2, device="meta")))], {}, config, {})
    optimizer = build_optimizer(config, AdamWOptions(), groups)
    assert not skips_on_device(optimizer)
    assert "host sync" in caplog.text


def test_lion_by_hand() -> None:
    p = nn.Parameter(torch.tensor([1.0, -2.0, 0.0]))
    optimizer = Lion([p], lr=0.1, betas=(0.9, 0.5), weight_decay=0.5)
    p.grad = torch.tensor([4.0, -4.0, 0.0])
    optimizer.step()  # the average is 0: u = sign(g); p (1 - 0.05) - 0.1 u
    torch.testing.assert_close(p.data, torch.tensor([0.85, -1.8, 0.0]))
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.tensor([2.0, -2.0, 0.0]))
    p.grad = torch.tensor([-8.0, -4.0, 1.0])
    optimizer.step()  # 0.9 * 2 - 0.1 * 8 > 0: the average outvotes the gradient
    torch.testing.assert_close(p.data, torch.tensor([0.7075, -1.61, -0.1]))


def test_lion_steps_by_the_learning_rate_and_has_half_of_adamws_state() -> None:
    model, optimizer = built("lion", lr=0.125, weight_decay=0.0)
    before = [p.detach().clone() for p in model.parameters()]
    give_gradients(model.parameters(), 0)
    optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close((p - old).abs(), torch.full_like(p, 0.125))
    adamw_model, adamw = built("adamw", AdamWOptions())
    for p, q in zip(model.parameters(), adamw_model.parameters(), strict=True):
        sizes = [
            sum(t.numel() for t in o.state[x].values() if t.ndim) for o, x in ((optimizer, p), (adamw, q))
        ]
        assert 2 * sizes[0] == sizes[1]


def test_lion_decays_only_what_decays() -> None:
    model, optimizer = built("lion", lr=0.1, weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        decayed = ROLES[name] in ("matrix", "head")
        torch.testing.assert_close(p.data, before[name] * (0.95 if decayed else 1.0))
