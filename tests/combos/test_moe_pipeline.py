"""Experts in a model that is cut into stages: the same run as in one process."""

from __future__ import annotations

from typing import Any

import pytest

from forge_core.config import ConfigError
from forge_core.plugins import Plugins
from forge_core.testing import tiny_config
from forge_core.testing.pool import WorkerPool

pytestmark = pytest.mark.packages("moe", "pp")


def cut(ranks: int, schedule: str, moe: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Four layers, two micro-batches a stage at least."""
    from moeruns import tables

    model = {"n_kv_heads": 2, "ffn_hidden_dim": 24, "n_layers": 4}
    found = tables(ranks, 4 // ranks, model=model, moe=moe or {}, **more)
    return {**found, "pp": {"size": 2, "schedule": schedule}} if schedule else found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "zbv"])
def test_stages_have_the_losses_and_biases_of_one_process(pool2: WorkerPool, schedule: str) -> None:
    """Losses are attached to the weights of the router, where every schedule finds them."""
    from moeruns import check

    check(pool2, cut(1, ""), cut(1, schedule))


@pytest.mark.slow
def test_stages_beside_divided_experts(pool4: WorkerPool) -> None:
    from moeruns import check

    check(pool4, cut(1, ""), cut(2, "1f1b", {"ep": 2}))


def test_counting_an_update_before_it_is_trained_needs_the_step_of_the_core() -> None:
    """Two plugins then want to run the step; which one is told, and how to settle it."""
    tables = cut(1, "1f1b", {"aux_loss": "exact"})
    with pytest.raises(ConfigError, match=r"moe\.aux_loss"):
        tiny_config(plugins=Plugins(), world_size=2, **tables)
