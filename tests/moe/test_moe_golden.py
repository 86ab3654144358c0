"""Losses of a small run, recorded once: whoever changes them has changed what a run computes."""

from __future__ import annotations

from typing import Any

import pytest

from forge_core.plugins import Plugins
from forge_core.testing import run_tiny, tiny_config

RECORDED: dict[str, tuple[dict[str, Any], list[float], list[float]]] = {
    "softmax": (
        {"num_experts": 4, "top_k": 2},
        [4.194720632907525, 4.193587349346223, 4.2248807312809],
        [1.0220606457855348, 0.9864021732858871, 0.9682484304255263],
    ),
    "sigmoid, groups, shared": (
        {
            "num_experts": 8,
            "top_k": 2,
            "router": "sigmoid",
            "shared_experts": 1,
            "expert_hidden_dim": 16,
            "sigmoid": {"n_groups": 4, "top_groups": 2},
        },
        [4.199359224377028, 4.1987910524415755, 4.229566473557827],
        [1.022681955098557, 0.9865959158207048, 0.9666156995518538],
    ),
    "capacity": (
        {
            "num_experts": 4,
            "top_k": 2,
            "capacity_factor": 0.75,
            "capacity_priority": "score",
            "gradient_scaling": True,
        },
        [4.19458439607594, 4.193553128832582, 4.224844360706549],
        [1.0221271784779937, 0.9865341032521554, 0.9682355405824642],
    ),
    "latent attention": (
        {"num_experts": 4, "top_k": 1, "mla": {"kv_rank": 6, "q_rank": 4, "nope_dim": 6, "v_dim": 10}},
        [4.192955806123238, 4.191365192011922, 4.219368626834903],
        [1.0309162348551606, 0.9884303802796234, 0.9647169114585781],
    ),
}


@pytest.mark.parametrize("case", RECORDED)
def test_recorded_losses(case: str) -> None:
    moe, objectives, norms = RECORDED[case]
    plugins = Plugins()
    found = run_tiny(tiny_config(plugins=plugins, moe=moe, train={"dtype": "fp64"}), plugins)
    assert found.objectives == pytest.approx(objectives, rel=1e-9)
    assert found.grad_norms == pytest.approx(norms, rel=1e-9)
