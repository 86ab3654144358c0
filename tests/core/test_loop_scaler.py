"""fp16: the loss is scaled, an overflow skips an update and halves the factor, and the factor is saved."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from forge_core.contract import StepResult
from forge_core.contract.runtime import Observer
from forge_core.errors import ForgeError
from forge_core.loop.accumulate import AccumulateStep
from forge_core.loop.scaler import START, LossScaler
from forge_core.testing import (
    WorkerPool,
    isolated_plugins,
    plugin_object,
    run_tiny,
    tiny_config,
    tiny_session,
)

FP16: dict[str, Any] = {"dtype": "fp16", "max_steps": 6}


def outcome(tables: dict[str, Any], start: float = 0.0) -> dict[str, Any]:
    """Losses, norms, which updates happened, and the factor after each."""

    class Watch(Observer):
        def train_begin(self, session: Any) -> None:
            if start:
                session.scaler.load_state_dict({"scale": start, "good": 0})

        def step_end(self, session: Any, step: int, result: StepResult) -> None:
            factors.append(0.0 if session.scaler is None else float(session.scaler.scale))

    factors: list[float] = []
    plugins = isolated_plugins({"watch": plugin_object(forge_observers=lambda: [Watch()])})
    run = run_tiny(tiny_config(plugins=plugins, watch=True, **tables), plugins)
    return {"losses": run.losses, "norms": run.grad_norms, "oks": run.oks, "factors": factors}


def test_updates_are_those_of_single_precision_to_rounding() -> None:
    plain, half = outcome({"train": {"max_steps": 6}}), outcome({"train": FP16})
    assert half["losses"] == pytest.approx(plain["losses"], rel=2**-9)
    assert half["norms"] == pytest.approx(plain["norms"], rel=2**-6)
    assert half["factors"] == [START] * 6


def test_an_overflow_skips_and_halves() -> None:
    # a factor of 2^24 takes gradients of 1 beyond 65504, the largest number of fp16
    found = outcome({"train": {**FP16, "max_steps": 8}}, start=2.0**24)
    skipped = found["oks"].index(True)
    assert 0 < skipped < 8
    assert found["factors"][skipped] == 2.0 ** (24 - skipped)
    assert all(not math.isfinite(norm) for norm in found["norms"][:skipped])
    assert all(found["oks"][skipped:])


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}])
def test_ranks_scale_alike(pool2: WorkerPool, sizes: dict[str, Any]) -> None:
    one = outcome({"train": {**FP16, "batch_size": 4}})
    tables = {"train": {**FP16, "batch_size": 4 if sizes else 2}, "distributed": sizes}
    for found in pool2.run(outcome, tables):
        assert found["losses"] == pytest.approx(one["losses"], rel=2**-9)
        assert found["norms"] == pytest.approx(one["norms"], rel=2**-6)
        assert found["factors"] == one["factors"]


def test_the_factor_doubles_after_enough_good_updates() -> None:
    scaler = LossScaler(interval=3)
    for finite in (True, True, False, True, True, True, True):
        scaler.update(torch.tensor(finite))
    # halved once; the counter began anew, reached three, doubled, and counts one since
    assert scaler.state_dict() == {"scale": START, "good": 1}


def test_state_goes_through_a_checkpoint_unchanged() -> None:
    with tiny_session(tiny_config(train=FP16)) as session:
        (extra,) = session.checkpoint_extras["core"]
        extra.load_state_dict({"scale": 256.0, "good": 7})
        assert session.scaler is not None
        assert float(session.scaler.scale) == 256.0
        assert extra.state_dict() == {"scale": 256.0, "good": 7}


def test_a_step_function_that_does_not_scale_is_an_error() -> None:
    class Plain(AccumulateStep):
        def train(self, session: Any, step: int) -> StepResult:
            session.scaler.begin = lambda: torch.ones(())  # as if it had never asked
            return super().train(session, step)

    plugins = isolated_plugins({"plain": plugin_object(forge_build_step_fn=lambda: Plain())})
    config = tiny_config(plugins=plugins, plain=True, train=FP16)
    with pytest.raises(ForgeError, match="does not scale its loss"):
        run_tiny(config, plugins)
