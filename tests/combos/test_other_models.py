"""Which keys of the families make it another model when a run goes on with other values of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_core.plugins import Plugins
from forge_core.testing import tiny_config


def other(before: Any, now: Any) -> set[str]:
    from forge_ckpt.changes import changes, of_the_model

    found = changes(before.to_toml(), now.to_toml())
    assert found
    return {path for path, *_ in of_the_model(found, now)}


def with_experts(**moe: Any) -> Any:
    return tiny_config(plugins=Plugins(), moe={"num_experts": 4, **moe})


@pytest.mark.packages("ckpt", "moe")
def test_experts() -> None:
    before = with_experts()
    computes = {"top_k": 1, "capacity_factor": 1.5, "softmax": {"renormalise": False}}
    assert other(before, with_experts(**computes)) == {
        "moe.top_k",
        "moe.capacity_factor",
        "moe.softmax.renormalise",
    }
    assert "moe.router" in other(before, with_experts(router="sigmoid"))
    trains = {"aux_loss_weight": 0.5, "jitter": 0.1, "kernel": "loop", "upcycle_noise": 0.1, "ep": 2}
    apart = tiny_config(plugins=Plugins(), world_size=2, moe={"num_experts": 4, **trains})
    assert other(before, apart) == set()


@pytest.mark.packages("ckpt", "vlm")
def test_what_sees(tmp_path: Path) -> None:
    from vlmkit import config_of

    def seeing(**vlm: Any) -> Any:
        return config_of(tmp_path, Plugins(), vlm=vlm)

    before = seeing()
    computes = {"fusion": "mot", "encoder": {"vit": {"n_heads": 1}}, "connector": {"mlp": {"bias": False}}}
    assert other(before, seeing(**computes)) >= {
        "vlm.fusion",
        "vlm.encoder.vit.n_heads",
        "vlm.connector.mlp.bias",
    }
    assert other(before, seeing(fusion="joint", joint={"bidirectional": "image"})) == {
        "vlm.joint.bidirectional"
    }
    trains = {"max_images": 7, "answer_tokens": 2, "encoder": {"frozen": False, "vit": {"dropout": 0.1}}}
    assert other(before, seeing(**trains)) == set()
