"""A frozen model beside the session's, on one process and divided over several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from forge_core import frozen_twin
from forge_core.contract import LossTerm, Transform
from forge_core.errors import PluginError
from forge_core.testing import (
    TinyRun,
    WorkerPool,
    isolated_plugins,
    plugin_object,
    run_tiny,
    tiny_config,
    tiny_session,
)

NAME = "mine/start"


def distance(session: Any) -> LossTerm:
    """How far the last hidden states are from those of the start."""

    def term(model: nn.Module, batch: Any, output: Any) -> torch.Tensor:
        twin = session.auxiliary_models[NAME]
        with torch.no_grad():
            start = twin(batch["tokens"], positions=batch["positions"], documents=batch.get("documents"))
        apart: torch.Tensor = output.hidden - start
        return apart.square().sum()

    return LossTerm(name="mine", weight=1.0, needs="hidden", per="tokens", term=term)


def trained(layout: dict[str, Any], batch_size: int) -> TinyRun:
    halved = Transform(phase="adapt", name="mine", apply=halve)
    plugin = plugin_object(
        forge_model_transforms=[halved],
        forge_auxiliary_models=lambda session: {NAME: frozen_twin(session)},
        forge_extra_losses=lambda session: [distance(session)],
    )
    plugins = isolated_plugins({"mine": plugin})
    train = {"batch_size": batch_size, "dtype": "fp64"}
    return run_tiny(tiny_config(plugins=plugins, mine=True, train=train, distributed=layout), plugins)


def halve(model: nn.Module) -> nn.Module:
    """What a warm start does: it changes values that are there already."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def distances(layout: dict[str, Any], batch_size: int) -> list[float]:
    return trained(layout, batch_size).metric("loss/mine")


def test_the_twin_has_the_values_of_the_start_and_keeps_them() -> None:
    run = trained({}, 4)
    twin: nn.Module = run.session.auxiliary_models[NAME]
    assert not any(parameter.requires_grad for parameter in twin.parameters())
    assert not any(module.training for module in twin.modules())
    found = run.metric("loss/mine")
    assert found[0] == 0.0
    assert all(value > 0 for value in found[1:])
    assert [n for n, p in twin.named_parameters() if p.equal(run.weights[n])] == []


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"tp": 2, "sequence_parallel": True}])
def test_a_divided_twin_is_the_same(pool2: WorkerPool, layout: dict[str, Any]) -> None:
    alone = distances({}, 4)
    for found in pool2.run(distances, layout, 2 if "dp_shard" in layout else 4):
        assert found == pytest.approx(alone, rel=1e-10)


def test_a_model_that_is_built_in_two_ways_is_refused() -> None:
    built: list[int] = []

    def forge_build_model(decoder: nn.Module) -> nn.Module:
        built.append(1)
        setattr(decoder, f"extra{len(built)}", nn.Linear(2, 2))
        return decoder

    plugins = isolated_plugins({"mine": plugin_object(forge_build_model=forge_build_model)})
    with (
        tiny_session(tiny_config(plugins=plugins, mine=True), plugins) as session,
        pytest.raises(PluginError, match=r"another model the second time: extra1\.bias"),
    ):
        frozen_twin(session)
