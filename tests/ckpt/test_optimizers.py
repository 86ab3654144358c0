"""Optimizer state of any make comes back as it was: values, dtypes, numbers, and nothing that was not
there.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptkit import assert_same_run, killed, plugins_for, run

from forge_ckpt import open_checkpoint
from forge_ckpt.errors import CheckpointError, RefusedError
from forge_ckpt.index import Index
from forge_ckpt.optimizers import load_optimizers
from forge_core.contract import Alias, NamedOptimizer, Transform
from forge_core.contract.runtime import Observer
from forge_core.testing import tiny_config, tiny_session


class Lazy(torch.optim.Optimizer):
    """Momentum in fp64 for fp32 weights, made at a parameter's first update; half of them never get one."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1, "updates": 0, "scale": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["updates"] += 1
            group["scale"] *= 0.9
            for p in group["params"][::2]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=0, seen=False, average=torch.zeros_like(p, dtype=torch.float64))
                state["count"] += 1
                state["seen"] = True
                state["average"].lerp_(p.grad.double(), 0.1)
                p.add_(state["average"].to(p.dtype), alpha=-group["lr"] * group["scale"])


def lazy(session: Any, model: Any) -> dict[str, NamedOptimizer]:
    named = session.freeze.ever_trainable()
    group = {"params": list(named.values()), "param_names": list(named), "name": "all", "initial_lr": 0.1}
    return {"main": NamedOptimizer(optimizer=Lazy([group]), schedule=lambda n: 1.0)}


def test_an_optimizer_of_somebody_else(tmp_path: Path) -> None:
    hooks: dict[str, Any] = {"forge_build_optimizers": lazy}
    straight = run(tmp_path / "s", plugins=plugins_for(hooks=hooks))
    killed(tmp_path / "k", 4, hooks=hooks)
    resumed = run(tmp_path / "k", plugins=plugins_for(hooks=hooks))
    assert_same_run(straight, resumed)
    optimizer = resumed.session.optimizers["main"].optimizer
    states = list(optimizer.state.values())
    assert 0 < len(states) < len(optimizer.param_groups[0]["params"])
    assert {s["average"].dtype for s in states} == {torch.float64}
    assert {(type(s["count"]), s["count"], s["seen"]) for s in states} == {(int, 6, True)}
    assert optimizer.param_groups[0]["updates"] == 6


def test_half_an_entry_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, steps=2)
    saved = open_checkpoint(tmp_path / "a")
    gone = "optimizer/main/embed.weight/exp_avg_sq"
    saved._index = Index({n: t for n, t in saved.index.tensors.items() if n != gone})
    with pytest.raises(CheckpointError, match=r"embed\.weight lacks exp_avg_sq"):
        load_optimizers(done.session, saved, saved.state()["optimizers"])


@pytest.mark.parametrize(("name", "kept", "dropped"), [("muon", 7, 14), ("lion", 0, 21)])
def test_another_optimizer_takes_what_it_has_a_use_for(
    name: str, kept: int, dropped: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Muon updates matrices and leaves the others to AdamW, whose moments go on; Lion has others."""
    run(tmp_path, steps=3)
    with pytest.raises(RefusedError, match=rf"optimizer\.name: was adamw in .*, is {name}") as caught:
        run(tmp_path, steps=4, optimizer={"name": name})
    assert f"exp_avg, exp_avg_sq, step of {dropped} parameters is of no use" in str(caught.value)
    assert f"the state of {kept} is kept" in str(caught.value)
    assert caught.value.exit_status == 2

    class Begin(Observer):
        def train_begin(self, session: Any) -> None:
            names = {id(p): n for n, p in session.freeze.named.items()}
            state = session.optimizers["main"].optimizer.state
            self.found = {names[id(p)]: {k: v.clone() for k, v in s.items()} for p, s in state.items()}

    begin = Begin()
    with caplog.at_level(logging.WARNING, logger="forge"):
        run(
            tmp_path,
            plugins=plugins_for(hooks={"observers": [begin]}),
            steps=4,
            optimizer={"name": name},
            checkpoint={"allow_changed": ["optimizer"]},
        )
    assert f"parameters is of no use, and starts afresh; the state of {kept} is kept" in caplog.text
    saved = open_checkpoint(tmp_path / "a/checkpoints/step_00000003")
    same = {n for n, s in begin.found.items() if "exp_avg_sq" in s}
    assert len(same) == kept
    for parameter, state in begin.found.items():
        for key, value in state.items():
            if parameter in same:
                assert torch.equal(value, saved.tensor(f"optimizer/main/{parameter}/{key}")), (parameter, key)
            else:
                assert not value.any(), (parameter, key)
    # from here on it is the optimizer of the run
    assert run(tmp_path, steps=5, optimizer={"name": name}).status == 0


def test_state_of_an_optimizer_that_is_not_there_any_more_is_told(tmp_path: Path) -> None:
    run(tmp_path, plugins=plugins_for(hooks={"forge_build_optimizers": lazy}), steps=2)
    with pytest.raises(CheckpointError, match="lacks exp_avg") as caught:
        run(tmp_path, steps=3)
    assert 'allow_changed = ["optimizer"]' in caught.value.hint
    assert run(tmp_path, steps=3, checkpoint={"allow_changed": ["optimizer"]}).status == 0


def test_what_a_plugin_leaves_out_is_not_saved(tmp_path: Path) -> None:
    hidden = Alias(name="hidden", patterns=("embed.*",), frozen=True, saved=False)
    hooks: dict[str, Any] = {"forge_module_aliases": lambda: [hidden]}
    straight = run(tmp_path / "s", plugins=plugins_for(hooks=hooks))
    killed(tmp_path / "k", 4, hooks=hooks)
    assert "model/embed.weight" not in open_checkpoint(tmp_path / "k/a").index.tensors
    assert_same_run(straight, run(tmp_path / "k", plugins=plugins_for(hooks=hooks)))


def test_a_state_that_is_no_tensor_or_number_is_named(tmp_path: Path) -> None:
    class Odd(Lazy):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for state in self.state.values():
                state["odd"] = "text"

    def odd(session: Any, model: Any) -> dict[str, NamedOptimizer]:
        named = lazy(session, model)["main"]
        return {"main": NamedOptimizer(optimizer=Odd(named.optimizer.param_groups), schedule=named.schedule)}

    with pytest.raises(CheckpointError, match=r"embed\.weight/odd: a str in an optimizer's state"):
        run(tmp_path, plugins=plugins_for(hooks={"forge_build_optimizers": odd}), steps=2)


@pytest.mark.parametrize("moves", [True, False])
def test_a_tensor_in_a_group_is_configured_or_an_error(moves: bool, tmp_path: Path) -> None:
    """One that changes is state that a checkpoint would lose."""

    class Scaled(Lazy):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            if moves:
                self.param_groups[0]["size"] += 1.0

    def scaled(session: Any, model: Any) -> dict[str, NamedOptimizer]:
        named = lazy(session, model)["main"]
        groups = [{**group, "size": torch.ones(())} for group in named.optimizer.param_groups]
        return {"main": NamedOptimizer(optimizer=Scaled(groups), schedule=named.schedule)}

    plugins = plugins_for(hooks={"forge_build_optimizers": scaled})
    if not moves:
        assert run(tmp_path, plugins=plugins, steps=2).status == 0
        return
    with pytest.raises(CheckpointError, match="tensors in parameter groups cannot be saved: size"):
        run(tmp_path, plugins=plugins, steps=2)


def test_moments_wider_than_their_parameters_and_parameters_without(tmp_path: Path) -> None:
    """bfloat16 weights with float32 moments; half of the weights had no gradient before the save."""

    def wide(session: Any, model: Any) -> dict[str, NamedOptimizer]:
        named = lazy(session, model)["main"]
        groups = named.optimizer.param_groups
        return {"main": NamedOptimizer(optimizer=Wide(groups), schedule=named.schedule)}

    class Wide(torch.optim.Optimizer):
        def __init__(self, groups: Any) -> None:
            super().__init__(groups, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, average=torch.zeros_like(p, dtype=torch.float32))
                state["step"] += 1
                state["average"].lerp_(p.grad.float(), 0.1)
                p.add_(state["average"].to(p.dtype), alpha=-0.1)

    narrow = Transform(phase="adapt", name="narrow", apply=lambda model: model.to(torch.bfloat16))
    hooks = {"forge_build_optimizers": wide, "forge_model_transforms": lambda: [narrow]}
    plugins = plugins_for(hooks=hooks)
    run_table = {"dir": str(tmp_path), "name": "a"}
    config = tiny_config(plugins=plugins, checkpoint={"mode": "sync"}, run=run_table, test=True)

    def update(session: Any, which: slice) -> Any:
        optimizer = session.optimizers["main"].optimizer
        parameters = optimizer.param_groups[0]["params"]
        for p in parameters[which]:
            p.grad = torch.full_like(p, 0.3)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer, parameters

    with tiny_session(config, plugins) as session:
        keeper: Any = session.checkpointer
        keeper.load(session)
        update(session, slice(0, None, 2))
        optimizer, parameters = update(session, slice(0, None, 2))
        keeper.save(session, 2, "scheduled")
        averages = [optimizer.state[p]["average"].clone() for p in parameters[::2]]
        keeper.close()
    with tiny_session(config, plugins) as session:
        keeper = session.checkpointer
        assert keeper.load(session) == 2
        optimizer = session.optimizers["main"].optimizer
        parameters = optimizer.param_groups[0]["params"]
        assert {p.dtype for p in parameters} == {torch.bfloat16}
        for p, average in zip(parameters[::2], averages, strict=True):
            assert optimizer.state[p]["step"] == 2
            assert optimizer.state[p]["average"].dtype == torch.float32
            assert torch.equal(optimizer.state[p]["average"], average)
        assert not any(optimizer.state[p] for p in parameters[1::2])
        before = [p.clone() for p in parameters[1::2]]
        update(session, slice(1, None, 2))
        assert all(not torch.equal(p, old) for p, old in zip(parameters[1::2], before, strict=True))
        keeper.close()
