"""Skipping, unscaling, first state, loading, and what building refuses."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from optimkit import built, give_gradients
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from forge_core.config.tables import OptimizerConfig
from forge_core.optim import (
    HOST_SYNCS,
    build_optimizer,
    guarded_step,
    parameter_groups,
    skips_on_device,
)
from forge_core.optim.adamw import AdamW
from forge_core.optim.build import init_state
from forge_core.optim.options import AdamWOptions, MuonOptions
from forge_core.optim.skip import step_unless_flagged
from forge_core.testing.optimizers import HostReads, bits, differences


def test_any_optimizer_skips_on_a_cpu_without_a_read() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = AdamWScheduleFree([p])
    optimizer.train()
    assert not skips_on_device(optimizer)
    p.grad = torch.ones(2)
    with HostReads() as reads:
        guarded_step(optimizer, torch.tensor(False))
    assert reads.count == 0
    assert p.tolist() == [1.0, 1.0]
    guarded_step(optimizer, torch.tensor(True))
    assert p.tolist() != [1.0, 1.0]
    assert list(HOST_SYNCS) == [f"{guarded_step.__module__}:{guarded_step.__name__}"]


def test_fused_sgd_is_not_trusted() -> None:
    assert not skips_on_device(torch.optim.SGD([nn.Parameter(torch.ones(1))], momentum=0.9, fused=True))


def test_the_flag_does_not_outlive_the_step() -> None:
    model, optimizer = built("lion")
    give_gradients(model.parameters(), 0)
    step_unless_flagged(optimizer, torch.tensor(False))
    assert not hasattr(optimizer, "found_inf")
    before = bits(model, optimizer)
    optimizer.step()
    assert "hidden.weight" in differences(before, bits(model, optimizer))


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_gradients_can_be_unscaled_on_the_way(name: str) -> None:
    options = {"adamw": AdamWOptions(), "muon": MuonOptions(), "lion": None}[name]
    (model, optimizer), (twin, plain) = built(name, options), built(name, options)
    for update in range(3):
        give_gradients(model.parameters(), update)
        give_gradients(twin.parameters(), update)
        for p in model.parameters():
            p.grad.mul_(4.0)
        optimizer.grad_scale = torch.tensor(4.0)
        step_unless_flagged(optimizer, torch.tensor(True))
        plain.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_first_state_is_the_one_torch_makes() -> None:
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    ours, torchs = torch.optim.AdamW([p], fused=True), torch.optim.AdamW([q], fused=True)
    init_state(ours)
    q.grad = torch.zeros(3)
    torchs.found_inf = torch.ones(())
    torchs.step()
    assert ours.state[p].keys() == torchs.state[q].keys()
    for key, value in torchs.state[q].items():
        mine = ours.state[p][key]
        assert (mine.dtype, mine.shape, mine.tolist()) == (value.dtype, value.shape, value.tolist())


def test_norm_gains_move_under_small_rates() -> None:
    model, optimizer = built("adamw", AdamWOptions(), lr=3e-4)
    for update in range(10):
        give_gradients(model.parameters(), update)
        optimizer.step()
    assert (model.norm.weight != 1.0).all()


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_loading_keeps_what_is_configured_and_says_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    options = AdamWOptions() if name == "adamw" else None
    _, saved = built(name, options, lr=0.5, weight_decay=0.2)
    _, optimizer = built(name, options, lr=0.25, weight_decay=0.2)
    state = saved.state_dict()
    for group in state["param_groups"]:
        group["param_names"] = ["from", "another", "layout"]
    names = [group["param_names"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert [group["param_names"] for group in optimizer.param_groups] == names
    assert "initial_lr 0.5 was saved, 0.25 is configured and used" in caplog.text
    assert "weight_decay" not in caplog.text


def test_an_optimizer_that_drops_a_parameter_is_refused() -> None:
    config = OptimizerConfig()
    named = [("a", nn.Parameter(torch.ones(1))), ("b", nn.Parameter(torch.ones(1)))]
    groups = parameter_groups(named, {}, config, {})
    with pytest.raises(ValueError, match="exactly once"):
        build_optimizer(config, None, groups, lambda given, *_: torch.optim.SGD(given[0]["params"][:1]))
    with pytest.raises(ValueError, match="initial_lr"):
        build_optimizer(config, None, groups, lambda given, *_: torch.optim.SGD(given[0]["params"]))
    with pytest.raises(KeyError, match="no optimizer 'adamv'"):
        build_optimizer(OptimizerConfig(name="adamv"), None, groups)


def test_hooks_of_others_are_heard() -> None:
    model, optimizer = built("adamw", AdamWOptions())
    heard: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: heard.append("before")),
        optimizer.register_step_post_hook(lambda *_: heard.append("after")),
        register_optimizer_step_post_hook(lambda *_: heard.append("after any")),
    ]
    try:
        for expected in (["before", "after", "after any"], ["after", "after any"], ["after any"], []):
            heard.clear()
            give_gradients(model.parameters(), 0)
            guarded_step(optimizer, torch.tensor(True))
            assert heard == expected
            if handles:
                handles.pop(0).remove()
    finally:
        for handle in handles:
            handle.remove()


def test_a_step_that_somebody_put_in_place_is_taken() -> None:
    _, optimizer = built("adamw", AdamWOptions())
    taken: list[str] = []
    optimizer.step = lambda: taken.append("theirs")  # type: ignore[method-assign]
    guarded_step(optimizer, torch.tensor(True))
    assert taken == ["theirs"]


def test_what_others_put_around_a_class_is_not_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper made with `functools.wraps` bears the marks of the range of torch that it is around."""
    model, optimizer = built("lion")
    inner, taken = type(optimizer).step, []

    @functools.wraps(inner)
    def watched(*args: Any) -> Any:
        taken.append("theirs")
        return inner(*args)

    monkeypatch.setattr(type(optimizer), "step", watched)
    give_gradients(model.parameters(), 0)
    guarded_step(optimizer, torch.tensor(True))
    assert taken == ["theirs"]


def test_a_profiler_sees_the_range_of_the_step() -> None:
    model, optimizer = built("adamw", AdamWOptions())
    give_gradients(model.parameters(), 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        guarded_step(optimizer, torch.tensor(True))
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.float32, torch.float64)])
def test_adamw_has_the_bits_of_torch(dtypes: tuple[torch.dtype, ...]) -> None:
    def pair() -> list[nn.Parameter]:
        torch.manual_seed(0)
        return [nn.Parameter(torch.randn(5, 3, dtype=dtype)) for dtype in dtypes]

    given = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    ours, torchs = pair(), pair()
    optimizers = [AdamW(ours, **given), torch.optim.AdamW(torchs, **given)]
    for update in range(4):
        for p, q in zip(ours, torchs, strict=True):
            p.grad = torch.randn(5, 3, dtype=p.dtype)
            q.grad = p.grad.clone()
            if update == 2:
                p.grad[0, 0] = q.grad[0, 0] = torch.inf
        for optimizer in optimizers:
            step_unless_flagged(optimizer, torch.tensor(update != 2))
    for p, q in zip(ours, torchs, strict=True):
        assert torch.equal(p, q)
        mine, theirs = optimizers[0].state[p], optimizers[1].state[q]
        assert list(mine) == list(theirs)
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert mine["step"].item() == 3
