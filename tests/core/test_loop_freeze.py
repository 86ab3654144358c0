"""Frozen modules keep every bit; stages apply at their step whatever happened to it; modes are restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from casekit import ListData, case_plugin, case_session, sgd, unit
from torch import Tensor, nn

from forge_core import run_training_loop
from forge_core.contract import Alias, Output
from forge_core.errors import ConfigError, ForgeError
from forge_core.loop.evaluate import evaluate


class Part(nn.Module):
    """A weight that starts at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forge_reset(self, generator: Any) -> None:
        nn.init.ones_(self.w)


class Two(nn.Module):
    """Two weights with gradient x each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = Part(), Part()
        self.drop = nn.Dropout(0.5)


class Sum:
    def count(self, batch: dict[str, Tensor]) -> dict[str, int]:
        return {"tokens": 1, "sequences": 1}

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> Output:
        loss = (model.a.w + model.c.w) * batch["x"].mean()
        return Output(loss_sum=loss, token_loss=loss.detach())


ALIASES = [Alias(name="first", patterns=("a.*",)), Alias(name="second", patterns=("c.*",))]


def adamw(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1, fused=True)


def plugin(xs: list[float], optimizer: Any = adamw) -> Any:
    return case_plugin(
        Two,
        ListData([unit(x) for x in xs]),
        Sum(),
        optimizer,
        forge_module_aliases=lambda: ALIASES,
    )


def test_frozen_after_training_keeps_value_and_state(tmp_path: Path) -> None:
    """Five updates give 0.460891; ten more of the rest move nothing (0.460891 again, not by momentum or
    decay)."""
    flags = [
        "--freeze.stages=[{start_step=6, modules=['first']}]",
        "--train.max_steps=15",
        "--train.grad_clip_norm=0",
    ]
    with case_session(tmp_path, plugin([1.0]), *flags) as session:
        after_five: list[Tensor] = []

        def watch(s: Any, step: int, result: Any) -> None:
            if step == 5:
                state = s.optimizers["main"].optimizer.state[s.model.a.w]
                after_five.extend(
                    [s.model.a.w.detach().clone(), state["exp_avg"].clone(), state["step"].clone()]
                )

        session.events["step_end"] = (watch,)
        run_training_loop(session)
        assert after_five[0].item() == pytest.approx(0.460891, abs=1e-6)
        state = session.optimizers["main"].optimizer.state[session.model.a.w]
        now = [session.model.a.w.detach(), state["exp_avg"], state["step"]]
        assert all(torch.equal(x, y) for x, y in zip(after_five, now, strict=True))
        assert session.model.c.w.item() < 0.0


def test_unfrozen_module_trains_from_its_step_on(tmp_path: Path) -> None:
    flags = [
        "--freeze.modules=['first']",
        "--freeze.stages=[{start_step=3, modules=[]}]",
        "--train.max_steps=3",
    ]
    with case_session(tmp_path, plugin([1.0], sgd(0.1)), *flags, "--train.grad_clip_norm=0") as session:
        values: list[float] = []
        session.events["step_end"] = (lambda s, step, result: values.append(s.model.a.w.item()),)
        run_training_loop(session)
    assert values == pytest.approx([1.0, 1.0, 0.9])


def test_stage_at_a_skipped_step_still_applies(tmp_path: Path) -> None:
    flags = ["--freeze.stages=[{start_step=2, modules=['first']}]", "--train.max_steps=3"]
    with case_session(tmp_path, plugin([1.0, float("nan"), 1.0], sgd(0.1)), *flags) as session:
        session.log.disabled = True
        run_training_loop(session)
        assert session.freeze.stage == 1
        assert not session.model.a.w.requires_grad


def test_default_frozen_alias_never_enters_the_optimizer(tmp_path: Path) -> None:
    frozen = [Alias(name="first", patterns=("a.*",), frozen=True), ALIASES[1]]
    case = plugin([1.0], sgd(0.1))
    type(
        case
    ).forge_module_aliases = staticmethod(  # the same plugin, but its first part is frozen by default
        __import__("forge_core").hookimpl(lambda: frozen, specname="forge_module_aliases")
    )
    with case_session(tmp_path, case, "--train.max_steps=2") as session:
        run_training_loop(session)
        assert session.model.a.w.item() == 1.0
        assert set(session.freeze.ever_trainable()) == {"c.w"}


def test_misspelt_module_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="did you mean 'first'"),
        case_session(tmp_path, plugin([1.0]), "--freeze.modules=['frist']"),
    ):
        pass


def test_a_run_in_which_nothing_trains_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="every parameter is frozen, from the first update to the last"),
        case_session(tmp_path, plugin([1.0]), "--freeze.modules=['first', 'second']"),
    ):
        pass
    later = ("--freeze.modules=['*']", "--freeze.stages=[{start_step=3, modules=['first']}]")
    with case_session(tmp_path, plugin([1.0]), *later) as session:
        assert set(session.freeze.ever_trainable()) == {"c.w"}


def test_evaluation_restores_each_module_mode(tmp_path: Path) -> None:
    class Broken:
        name = "broken"

        def __iter__(self) -> Any:
            yield unit(1.0)
            raise ForgeError("boom")

    case = plugin([1.0], sgd(0.1))
    with case_session(tmp_path, case, "--freeze.modules=['first']", "--train.max_steps=1") as session:
        session.freeze.apply(1)
        session.freeze.set_modes(session.model)
        modes = [session.model.a.training, session.model.c.training, session.model.drop.training]
        assert modes == [False, True, True]
        random_state = torch.get_rng_state()
        session.data.evaluation = [[unit(1.0)]]
        evaluate(session)
        session.data.evaluation = [Broken()]
        with pytest.raises(ForgeError, match="boom"):
            evaluate(session)
        assert [session.model.a.training, session.model.c.training, session.model.drop.training] == modes
        assert torch.equal(random_state, torch.get_rng_state())
        kept = (session.model.drop(torch.ones(1000)) == 0).float().mean()
        assert 0.35 < kept < 0.65
