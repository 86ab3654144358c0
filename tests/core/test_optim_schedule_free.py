"""Schedule-free AdamW against its recurrence, and its two modes."""

from __future__ import annotations

import pytest
import torch
from optimkit import built, give_gradients, random
from torch import Tensor, nn

from forge_core.config.tables import OptimizerConfig
from forge_core.optim import (
    build_optimizer,
    guarded_step,
    optimizer_mode,
    parameter_groups,
)
from forge_core.optim.options import ScheduleFreeOptions
from forge_core.testing.optimizers import bits, differences


def test_schedule_free_by_hand() -> None:
    """z <- z - lr g / (sqrt(v / (1 - b2^k)) + eps); x <- x + (z - x) / k; y = (1 - b1) z + b1 x."""
    lr, beta1, beta2 = 0.1, 0.9, 0.95
    p = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    config = OptimizerConfig(lr=lr, weight_decay=0.0, betas=(beta1, beta2), name="schedule_free_adamw")
    optimizer = build_optimizer(config, ScheduleFreeOptions(), parameter_groups([("w", p)], {}, config, {}))
    x = z = 1.0
    v = 0.0
    for k, gradient in enumerate((1.0, -0.5, 2.0, 0.25), start=1):
        p.grad = torch.tensor([gradient], dtype=torch.float64)
        guarded_step(optimizer, torch.tensor(True))
        v = beta2 * v + (1 - beta2) * gradient**2
        z -= lr * gradient / ((v / (1 - beta2**k)) ** 0.5 + 1e-8)
        x += (z - x) / k
        assert p.item() == pytest.approx((1 - beta1) * z + beta1 * x, abs=1e-12)
    y = p.item()
    with optimizer_mode(optimizer, "eval"):
        assert p.item() == pytest.approx(x, abs=1e-12)
    assert p.item() == y


def test_warmup_of_schedule_free_equals_that_of_a_constant_schedule() -> None:
    def run(options: ScheduleFreeOptions, warmup: int) -> Tensor:
        model, optimizer = built("schedule_free_adamw", options, lr=0.1)
        for update in range(1, 7):
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (min(1.0, update / warmup) if warmup else 1.0)
            give_gradients(model.parameters(), update)
            optimizer.step()
        return model.hidden.weight.detach()

    torch.testing.assert_close(run(ScheduleFreeOptions(warmup_steps=4), 0), run(ScheduleFreeOptions(), 4))


def test_modes_nest_and_are_refused_by_name() -> None:
    model, optimizer = built("schedule_free_adamw", ScheduleFreeOptions())
    give_gradients(model.parameters(), 0)
    optimizer.step()
    give_gradients(model.parameters(), 1)
    optimizer.step()
    before = bits(model, optimizer)
    optimizer_mode(optimizer, "eval")
    inside = bits(model, optimizer)
    with optimizer_mode(optimizer, "eval"):
        assert differences(inside, bits(model, optimizer)) == []
    assert differences(inside, bits(model, optimizer)) == []
    assert "hidden.weight" in differences(before, inside)
    optimizer_mode(optimizer, "train")
    assert differences(before, bits(model, optimizer)) == []
    with pytest.raises(ValueError, match="train, eval"):
        optimizer_mode(optimizer, "test")


def test_training_in_eval_mode_is_an_error() -> None:
    model, optimizer = built("schedule_free_adamw", ScheduleFreeOptions())
    give_gradients(model.parameters(), 0)
    with optimizer_mode(optimizer, "eval"), pytest.raises(Exception, match="train mode"):
        optimizer.step()


def test_weights_loaded_before_the_first_update_are_where_it_starts() -> None:
    def trained(load_after: bool) -> torch.Tensor:
        def load(target: nn.Module) -> None:
            for i, p in enumerate(target.parameters()):
                p.data.copy_(random(*p.shape, seed=i))

        options = ScheduleFreeOptions()
        model, optimizer = built("schedule_free_adamw", options, None if load_after else load)
        if load_after:
            load(model)
        weights = model.head.weight.detach().clone()
        with optimizer_mode(optimizer, "eval"):
            assert torch.equal(model.head.weight, weights)
        for update in range(3):
            give_gradients(model.parameters(), update)
            optimizer.step()
        return model.head.weight.detach()

    assert torch.equal(trained(load_after=True), trained(load_after=False))
