"""Tests of forge-newfamily: its parts against plain formulas, and what every plugin has to hold."""

from __future__ import annotations

import pytest
import torch

from forge_core.config import ConfigError
from forge_core.plugins import Plugins
from forge_core.testing import PluginConformance, run_tiny, tiny_config, tiny_model
from forge_newfamily.ffn import SquaredReluFFN


class TestConformance(PluginConformance):
    plugin = "newfamily"
    config = {"newfamily": {"every": 2, "penalty": 0.1}}


def test_the_part_is_the_formula() -> None:
    part = SquaredReluFFN(4, 8)
    x = torch.randn(2, 3, 4)
    hidden = (x @ part.up_proj.weight.T).clamp(min=0) ** 2
    torch.testing.assert_close(part(x, None), hidden @ part.down_proj.weight.T)


def test_every_second_layer_has_it() -> None:
    plugins = Plugins()
    config = tiny_config(plugins=plugins, newfamily={"every": 2}, model={"n_layers": 4})
    model = tiny_model(config, plugins)
    found = [isinstance(block.mlp, SquaredReluFFN) for block in model.layers.values()]
    assert found == [False, True, False, True]


def test_the_penalty_joins_the_objective() -> None:
    plugins = Plugins()
    run = run_tiny(tiny_config(plugins=plugins, newfamily={"penalty": 0.5}), plugins)
    term = run.metric("loss/newfamily")[0]
    assert term > 0
    assert run.objectives[0] == pytest.approx(run.losses[0] + term, rel=1e-5)


def test_a_layer_that_does_not_exist_is_a_problem() -> None:
    with pytest.raises(ConfigError, match="no layer has it"):
        tiny_config(plugins=Plugins(), newfamily={"every": 99})
