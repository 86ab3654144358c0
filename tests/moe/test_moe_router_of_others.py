"""A router that somebody else wrote is picked by its name, with options of its own."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_core.config import key, table
from forge_core.contract import Component
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
