"""Experts that start from a dense model compute what it computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.config import ConfigError
from forge_core.plugins import Plugins
from forge_core.testing import TinyRun, run_tiny, tiny_config, tiny_session
from forge_core.testing.pool import WorkerPool

pytestmark = pytest.mark.packages("ckpt", "moe")
MODEL = {"dim": 16, "n_layers": 2, "n_heads": 2, "ffn_hidden_dim": 24}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A trained dense model with a checkpoint."""
    plugins = Plugins()
    config = tiny_config(plugins=plugins, model=MODEL, run={"name": "dense"}, checkpoint={"mode": "sync"})
    return run_tiny(config, plugins, folder=tmp_path_factory.mktemp("dense"))


def tables(folder: Path, **moe: Any) -> dict[str, Any]:
    return {"model": MODEL, "moe": {"num_experts": 4, "top_k": 2, "upcycle_from": str(folder), **moe}}


def hidden_states(model: Any) -> torch.Tensor:
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found: torch.Tensor = model.eval()(tokens)
    return found


def test_the_model_computes_what_the_dense_one_did(dense: TinyRun) -> None:
    plugins = Plugins()
    with tiny_session(tiny_config(plugins=plugins, **tables(dense.folder)), plugins) as session:
        torch.testing.assert_close(hidden_states(session.model), hidden_states(dense.session.model))
        for name, weight in dense.weights.items():
            if ".mlp." not in name:
                assert session.freeze.named[name].equal(weight)


def test_biases_are_copied(tmp_path: Path) -> None:
    """Of a dense model that has trained, so that they are not 0; with hidden units that start anew only
    those of their layer differ."""
    plugins, biased = Plugins(), {**MODEL, "mlp_bias": True}
    config = tiny_config(plugins=plugins, model=biased, run={"name": "dense"}, checkpoint={"mode": "sync"})
    dense = run_tiny(config, plugins, folder=tmp_path)
    assert dense.weights["layers.0.mlp.up_proj.bias"].any()
    plugins = Plugins()
    given = {**tables(dense.folder), "model": biased}
    with tiny_session(tiny_config(plugins=plugins, **given), plugins) as session:
        torch.testing.assert_close(hidden_states(session.model), hidden_states(dense.session.model))
    plugins = Plugins()
    given = {**tables(dense.folder, upcycle_noise=0.25), "model": biased}
    with tiny_session(tiny_config(plugins=plugins, **given), plugins) as session:
        experts: Any = session.model.layers["0"].mlp.experts
        for own, theirs in (("b_gate", "gate_proj"), ("b_up", "up_proj")):
            same = getattr(experts, own) == dense.weights[f"layers.0.mlp.{theirs}.bias"]
            assert (~same).sum(-1).tolist() == [6] * 4
        down = dense.weights["layers.0.mlp.down_proj.bias"]
        assert experts.b_down.equal(down.expand_as(experts.b_down))


def test_a_share_of_hidden_units_starts_anew(dense: TinyRun) -> None:
    """A quarter of 24: 6 of each expert, others in each, the same in all three matrices."""
    plugins = Plugins()
    config = tiny_config(plugins=plugins, **tables(dense.folder, upcycle_noise=0.25))
    with tiny_session(config, plugins) as session:
        experts: Any = session.model.layers["0"].mlp.experts
        fresh = []
        for own, theirs, dim in (
            ("w_gate", "gate_proj", 1),
            ("w_up", "up_proj", 1),
            ("w_down", "down_proj", 2),
        ):
            same = getattr(experts, own) == dense.weights[f"layers.0.mlp.{theirs}.weight"]
            fresh.append(~same.all(3 - dim))
        assert fresh[0].sum(-1).tolist() == [6] * 4
        assert fresh[0].equal(fresh[1])
        assert fresh[0].equal(fresh[2])
        assert not fresh[0][0].equal(fresh[0][1])


def on_ranks(folder: str, ep: int) -> list[float]:
    plugins = Plugins()
    config = tiny_config(plugins=plugins, **tables(Path(folder), ep=ep, upcycle_noise=0.25))
    return run_tiny(config, plugins).losses


def test_the_same_on_divided_experts(dense: TinyRun, pool2: WorkerPool) -> None:
    one, other = pool2.run(on_ranks, str(dense.folder), 1), pool2.run(on_ranks, str(dense.folder), 2)
    assert other[0] == pytest.approx(one[0], rel=1e-5)


def test_what_does_not_fit_is_named(dense: TinyRun) -> None:
    for more, words in (({"expert_hidden_dim": 12}, "24 wide"), ({}, "model.n_heads")):
        plugins = Plugins()
        found = tables(dense.folder, **more)
        if not more:
            found["model"] = {**MODEL, "n_heads": 1}
        config = tiny_config(plugins=plugins, **found)
        with pytest.raises(ConfigError, match=words), tiny_session(config, plugins):
            pass
