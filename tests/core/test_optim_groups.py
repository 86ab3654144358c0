"""Parameter groups: every parameter once, decay by role, exceptions by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from forge_core.config.tables import GroupConfig, OptimizerConfig
from forge_core.errors import ConfigError, PluginError
from forge_core.optim import build_optimizer, guarded_step, parameter_groups
from forge_core.optim.groups import merged
from forge_core.testing.optimizers import ROLES, TinyModel


def grouped(config: OptimizerConfig, model: nn.Module | None = None, **kwargs: Any) -> list[dict[str, Any]]:
    model = model or TinyModel()
    kwargs = {"roles": ROLES, "aliases": {}} | kwargs
    return parameter_groups(model.named_parameters(), config=config, **kwargs)


def settings(groups: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    return {name: (g["lr"], g["weight_decay"]) for g in groups for name in g["param_names"]}


def test_decay_spares_norms_biases_and_embeddings() -> None:
    found = settings(grouped(OptimizerConfig(lr=0.5, weight_decay=0.1)))
    assert found == {
        "embed.weight": (0.5, 0.0),
        "hidden.weight": (0.5, 0.1),
        "hidden.bias": (0.5, 0.0),
        "norm.weight": (0.5, 0.0),
        "norm.bias": (0.5, 0.0),
        "head.weight": (0.5, 0.1),
    }


def test_roles_without_decay_are_configurable() -> None:
    found = settings(grouped(OptimizerConfig(weight_decay=0.1, no_decay=["head"])))
    assert [name for name, (_, decay) in found.items() if decay == 0.0] == ["head.weight"]


def test_every_distinct_parameter_is_in_one_group() -> None:
    model = TinyModel()
    groups = grouped(OptimizerConfig(), model)
    listed = [p for group in groups for p in group["params"]]
    assert len(listed) == len({id(p) for p in listed}) == len(list(model.parameters())) == 6
    by_name = dict(model.named_parameters())
    for group in groups:
        pairs = zip(group["param_names"], group["params"], strict=True)
        assert all(by_name[name] is p for name, p in pairs)
        assert group["lr"] == group["initial_lr"]


def test_tied_weights_are_one_parameter_with_the_role_of_the_first_name() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    named = list(model.named_parameters(remove_duplicate=False))
    assert len(named) == 2
    roles = {"embed.weight": "embedding", "head.weight": "head"}
    config = OptimizerConfig(lr=1.0, groups=[GroupConfig(modules="head.*", lr_scale=0.5)])
    (group,) = parameter_groups(named, roles, config, {})
    assert group["param_names"] == ["embed.weight"]
    assert group["params"] == [model["embed"].weight]
    assert (group["weight_decay"], group["lr"]) == (0.0, 0.5)


def test_currently_frozen_parameters_are_kept() -> None:
    model = TinyModel()
    model.hidden.requires_grad_(False)
    assert len(settings(grouped(OptimizerConfig(), model))) == 6


def test_a_name_without_a_role_goes_by_its_shape() -> None:
    named = [("gain", nn.Parameter(torch.ones(3))), ("mix", nn.Parameter(torch.ones(3, 3)))]
    found = settings(parameter_groups(named, {}, OptimizerConfig(weight_decay=0.1), {}))
    assert [found["gain"][1], found["mix"][1]] == [0.0, 0.1]


def test_last_matching_entry_settles_both_settings() -> None:
    config = OptimizerConfig(
        lr=1.0,
        weight_decay=0.1,
        groups=[
            GroupConfig(modules="*", lr_scale=0.5, weight_decay=0.3),
            GroupConfig(modules="body", lr_scale=0.25),
            GroupConfig(modules="head", weight_decay=0.2),  # a module stands for its parameters
        ],
    )
    found = settings(grouped(config, aliases={"body": ["hidden.*", "norm.weight"]}))
    assert found == {
        "embed.weight": (0.5, 0.0),
        "hidden.weight": (0.25, 0.1),
        "hidden.bias": (0.25, 0.0),
        "norm.weight": (0.25, 0.0),
        "norm.bias": (0.5, 0.0),
        "head.weight": (1.0, 0.2),
    }


def test_what_builds_no_optimizer_is_named() -> None:
    config = OptimizerConfig(name="mine/odd")
    with pytest.raises(PluginError, match=r"builds int, not a torch\.optim\.Optimizer"):
        build_optimizer(config, None, grouped(config), lambda groups, config, options: 3)  # type: ignore[arg-type, return-value]


def test_entries_that_match_nothing_are_all_reported() -> None:
    config = OptimizerConfig(groups=[GroupConfig(modules="hiden.weight"), GroupConfig(modules="tail")])
    with pytest.raises(ConfigError) as caught:
        grouped(config, aliases={"body": ["hidden.*"]})
    first, second = caught.value.problems
    assert (first.path, first.hint) == ("optimizer.groups.0.modules", "did you mean 'hidden.weight'?")
    assert (second.path, second.hint) == ("optimizer.groups.1.modules", "aliases: body")


def test_hidden_matrices_are_told_apart_until_merged() -> None:
    named = [
        ("a", nn.Parameter(torch.ones(2, 2))),
        ("stack", nn.Parameter(torch.ones(3, 2, 2))),
        ("head", nn.Parameter(torch.ones(2, 2))),
        ("vector", nn.Parameter(torch.ones(2))),
    ]
    roles = {"a": "matrix", "stack": "matrices", "head": "head", "vector": "matrix"}
    groups = parameter_groups(named, roles, OptimizerConfig(weight_decay=0.1), {})
    assert [(g["kind"], g["param_names"]) for g in groups] == [
        ("matrix", ["a"]),
        ("matrices", ["stack"]),
        ("other", ["head", "vector"]),
    ]
    assert len({g["name"] for g in groups}) == 3
    (group,) = merged(groups)
    assert group["param_names"] == ["a", "stack", "head", "vector"]
    assert group["name"] == "decay 0.1"
    assert groups[0]["param_names"] == ["a"], "merging must not change what it merges"


def test_default_settings_need_two_groups() -> None:
    assert [g["name"] for g in merged(grouped(OptimizerConfig()))] == ["decay 0", "decay 0.1"]


class Case(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.norm = nn.RMSNorm(1)
        nn.init.constant_(self.linear.weight, 1.0)
        nn.init.constant_(self.linear.bias, 0.5)


def case_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    roles = {"linear.weight": "matrix", "linear.bias": "bias", "norm.weight": "norm"}
    config = OptimizerConfig(lr=0.1, weight_decay=0.1)
    from forge_core.optim.options import AdamWOptions

    return build_optimizer(config, AdamWOptions(), grouped(config, model, roles=roles))


def test_ten_updates_of_pure_decay() -> None:
    model = Case()
    optimizer = case_optimizer(model)
    for _ in range(10):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        guarded_step(optimizer, torch.tensor(True))
    assert model.linear.weight.item() == pytest.approx(0.904382, abs=1e-6)  # 0.99 ** 10
    assert model.linear.bias.item() == 0.5
    assert model.norm.weight.item() == 1.0


def test_a_frozen_parameter_stands_still_and_keeps_its_state() -> None:
    model = Case()
    optimizer = case_optimizer(model)
    weight, rest = model.linear.weight, model.norm.weight
    for _ in range(5):
        for p in (weight, rest):
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert weight.item() == pytest.approx(0.460891, abs=1e-6)
    frozen_at, state = weight.item(), {k: v.clone() for k, v in optimizer.state[weight].items()}
    weight.grad = None
    for _ in range(10):
        rest.grad = torch.ones_like(rest)
        optimizer.step()
    assert weight.item() == frozen_at
    assert all(torch.equal(optimizer.state[weight][k], v) for k, v in state.items())
    assert optimizer.state[rest]["step"].item() == 15
