"""A run with experts saved on one layout goes on with another: weights, moments and biases are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_core.contract.runtime import Observer
from forge_core.plugins import Plugins
from forge_core.testing import plugin_object, run_tiny, tiny_config
from forge_core.testing.pool import WorkerPool

pytestmark = pytest.mark.packages("ckpt", "moe")
ROWS, HALF, STEPS = 8, 3, 6
MOE = {"num_experts": 4, "top_k": 2, "bias_rate": 0.01, "shared_experts": 1, "gradient_scaling": True}


def whole(tensor: Tensor) -> Tensor:
    value: Any = tensor.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


class State(Observer):
    """Weights, moments and biases when training begins and when it ends."""

    def __init__(self) -> None:
        self.begin: dict[str, Tensor] = {}
        self.end: dict[str, Tensor] = {}

    def train_begin(self, session: Any) -> None:
        self.begin, self.step = taken(session), session.step

    def train_end(self, session: Any, step: int, reason: str) -> None:
        self.end = taken(session)


def taken(session: Any) -> dict[str, Tensor]:
    found = {name: whole(p) for name, p in session.freeze.named.items()}
    found |= {name: b.clone() for name, b in session.model.named_buffers() if name.endswith("expert_bias")}
    names = {id(p): name for name, p in session.freeze.named.items()}
    for parameter, state in session.optimizers["main"].optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                found[f"{names[id(parameter)]}/{key}"] = whole(value)
    return found


def go(folder: str, ranks: int, steps: int, ep: int, optimizer: str) -> dict[str, Any]:
    state = State()
    plugins = Plugins()
    plugins = Plugins(installed=[*plugins.installed, _candidate(state)])
    config = tiny_config(
        plugins=plugins,
        run={"name": "a"},
        model={"n_kv_heads": 2, "ffn_hidden_dim": 24},
        moe={**MOE, "ep": ep},
        train={"dtype": "fp64", "batch_size": ROWS // ranks, "max_steps": steps},
        scheduler={"name": "constant"},
        optimizer={"name": optimizer, "lr": 1e-2},
        checkpoint={"interval": HALF, "keep_last": 0, "mode": "sync"},
        eval={"at_end": False},
        watching=True,
    )
    done = run_tiny(config, plugins, folder=folder)
    return {
        "begin": state.begin,
        "end": state.end,
        "step": state.step,
        "losses": done.losses,
        "norms": done.grad_norms,
    }


def _candidate(state: State) -> Any:
    from forge_core.plugins import Candidate

    watching = plugin_object(forge_observers=lambda: [state])
    return Candidate(name="watching", source="test", version="0", loaded=watching)


def same(one: dict[str, Tensor], other: dict[str, Tensor], limit: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=limit, atol=limit, msg=name)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_saved_with_two_expert_ranks_and_gone_on_with_one_and_four(
    pool2: WorkerPool, pool4: WorkerPool, optimizer: str, tmp_path: Path
) -> None:
    straight = go(str(tmp_path / "straight"), 1, STEPS, 1, optimizer)
    for name, pool, ranks, ep in (("one", None, 1, 1), ("four", pool4, 4, 4), ("pairs", pool4, 4, 2)):
        folder = str(tmp_path / name)
        first = pool2.run(go, folder, 2, HALF, 2, optimizer, timeout=100)
        arguments = (folder, ranks, STEPS, ep, optimizer)
        second = [go(*arguments)] if pool is None else pool.run(go, *arguments, timeout=100)
        for found in second:
            assert found["step"] == HALF
            same(found["begin"], first[0]["end"], 0.0)
            same(found["end"], straight["end"], 1e-10)
            assert found["losses"] == pytest.approx(straight["losses"][HALF:], rel=1e-10)
            assert found["norms"] == pytest.approx(straight["norms"][HALF:], rel=1e-10)
    assert any(bias.any() for name, bias in straight["end"].items() if name.endswith("expert_bias"))
