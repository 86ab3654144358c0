"""Beside plugins that somebody else wrote: a router picked by name, with options of its own, and stages."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_core.config import key, table
from forge_core.contract import Component, MeshAxis
from forge_core.errors import ConfigError
from forge_core.plugins import Candidate, Plugins
from forge_core.testing import plugin_object, run_tiny, tiny_config
from forge_moe.ffn import moe_layers
from forge_moe.routing import Router, RouterSpec, Routing


@table
class HashOptions:
    """Options of the hashing router."""

    shift: int = key(1, ge=0, help="By how much the second expert is further.")


class HashRouter(Router):
    """The token's place chooses its experts (Roller et al. 2021 choose by its id); weights are even."""

    def __init__(self, spec: RouterSpec, options: HashOptions) -> None:
        super().__init__(spec)
        self.options = options

    def route(self, logits: Tensor, valid: Tensor | None) -> Routing:
        experts = logits.shape[-1]
        first = torch.arange(len(logits)) % experts
        chosen = torch.stack([first, (first + self.options.shift) % experts], -1).reshape(-1)
        even = torch.full(chosen.shape, 0.5, dtype=logits.dtype)
        return Routing(chosen, even + 0 * logits.sum(), logits.softmax(-1), logits)


def plugins() -> Plugins:
    here = ModuleType("hash_router_of_tests")
    here.HashRouter, here.HashOptions = HashRouter, HashOptions  # type: ignore[attr-defined]
    sys.modules[here.__name__] = here
    component = Component(
        category="moe_router",
        name="hash",
        target=f"{here.__name__}:HashRouter",
        options=f"{here.__name__}:HashOptions",
    )
    mine = plugin_object(forge_components=lambda: [component])
    return Plugins(
        installed=[
            *(c for c in Plugins().installed if c.name == "moe"),
            Candidate(name="mine", source="test", version="0", loaded=mine),
        ]
    )


def test_it_routes_with_its_options() -> None:
    found = plugins()
    moe: dict[str, Any] = {"num_experts": 4, "router": "mine/hash", "mine/hash": {"shift": 2}}
    run = run_tiny(tiny_config(plugins=found, moe=moe), found)
    assert all(run.oks)
    for _, layer in moe_layers(run.session.model):
        assert isinstance(layer.router, HashRouter)
        assert layer.router.options.shift == 2
    assert run.metric("moe/expert_balance") == [1.0] * 3


def test_its_options_are_checked() -> None:
    moe = {"num_experts": 4, "router": "mine/hash", "mine/hash": {"shift": -1}}
    with pytest.raises(ConfigError, match="shift"):
        tiny_config(plugins=plugins(), moe=moe)


@table
class DepthConfig:
    """A table of somebody else's stages."""

    parts: int = key(1, ge=1, help="How many there are.")


def test_stages_of_others_take_their_ranks_before_experts_do() -> None:
    """Of four ranks two are stages: then two share the experts, and none an expert of an odd width."""
    axis = plugin_object(
        forge_tables=lambda: DepthConfig,
        forge_mesh_axes=lambda config: [
            MeshAxis(name="deep", size=config[DepthConfig].parts, place=10, params_differ=True)
        ],
    )
    others = Candidate(name="depth", source="test", version="0", loaded=axis)
    moe = {"num_experts": 4, "top_k": 2, "expert_hidden_dim": 33, "ep": 2}

    def config(parts: int) -> None:
        known = Plugins(installed=[*(c for c in Plugins().installed if c.name == "moe"), others])
        tiny_config(plugins=known, world_size=4, moe=moe, depth={"parts": parts})

    config(parts=2)
    with pytest.raises(ConfigError, match="33 is not divisible by the 2 ranks that share an expert"):
        config(parts=1)
