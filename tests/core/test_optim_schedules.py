"""Schedules against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from forge_core.config.tables import SchedulerConfig
from forge_core.optim import phased, schedules
from forge_core.optim.options import RexOptions, WsdOptions

SHAPES = {
    "cosine": None,
    "linear": None,
    "wsd": WsdOptions(),
    "constant": None,
    "rex": RexOptions(),
    "none": None,
}


def factors(name: str, max_steps: int, options: Any = None, **settings: Any) -> list[float]:
    schedule = getattr(schedules, name)(SchedulerConfig(**settings), options or SHAPES[name], max_steps)
    return [schedule(n) for n in range(1, max_steps + 1)]


def test_warmup_and_linear_decay_to_zero() -> None:
    found = factors("linear", 12, warmup_steps=4, min_lr_ratio=0.0)
    assert found == [0.25, 0.5, 0.75, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0]
    assert len(set(found[:4])) == 4
    assert len(set(found[4:])) == 8


def test_warmup_from_zero_is_one_update_later() -> None:
    found = factors("linear", 12, warmup_steps=4, min_lr_ratio=0.0, warmup_from_zero=True)
    assert found == [0.0, 0.25, 0.5, 0.75, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "none"])
def test_first_update_moves_and_the_last_warmup_update_is_at_the_base(name: str) -> None:
    found = factors(name, 20, warmup_steps=5)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "rex"])
def test_ends_at_the_ratio_exactly_and_stays(name: str) -> None:
    schedule = getattr(schedules, name)(SchedulerConfig(min_lr_ratio=0.1), SHAPES[name], 10)
    assert [schedule(n) for n in (10, 11, 1000)] == [0.1, 0.1, 0.1]
    assert schedule(9) > 0.1 or name == "rex"


def test_cosine() -> None:
    found = factors("cosine", 6, warmup_steps=2, min_lr_ratio=0.2)
    assert found == pytest.approx(
        [0.5, 1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5)), 0.2]
    )


def test_decay_steps_shorten_the_decay_and_zero_means_the_rest() -> None:
    assert factors("linear", 6, decay_steps=2, min_lr_ratio=0.0) == [0.5, 0, 0, 0, 0, 0]
    assert factors("linear", 6, decay_steps=0) == factors("linear", 6)


def test_wsd_is_flat_then_decays() -> None:
    settings = {"warmup_steps": 2, "min_lr_ratio": 0.0}
    found = factors("wsd", 10, WsdOptions(stable_steps=4, decay="linear"), **settings)
    assert found == [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    root = factors("wsd", 10, WsdOptions(stable_steps=4, decay="sqrt"), **settings)
    assert root[6:] == pytest.approx([math.sqrt(0.75), math.sqrt(0.5), 0.5, 0.0])
    assert all(a >= b for a, b in zip(root, found, strict=True))
    cosine = factors("wsd", 10, WsdOptions(stable_steps=4), **settings)
    assert cosine[6:] == pytest.approx([(1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0])


def test_rex() -> None:
    assert factors("rex", 5, min_lr_ratio=0.0) == pytest.approx(factors("linear", 5, min_lr_ratio=0.0))
    assert factors("rex", 4, RexOptions(alpha=2.0), min_lr_ratio=0.1) == pytest.approx(
        [0.5625, 0.25, 0.1, 0.1]
    )


def test_constant_and_none() -> None:
    assert factors("constant", 4, warmup_steps=2) == [0.5, 1, 1, 1]
    assert factors("none", 4, warmup_steps=2) == [1, 1, 1, 1]


@pytest.mark.parametrize("name", SHAPES)
def test_no_decay_left_keeps_the_base(name: str) -> None:
    assert factors(name, 3, warmup_steps=3)[-1] == 1.0
    schedule = getattr(schedules, name)(SchedulerConfig(warmup_steps=3), SHAPES[name], 3)
    assert schedule(4) == 1.0


def test_updates_count_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        schedules.cosine(SchedulerConfig(), None, 10)(0)


def test_the_order_of_calls_does_not_matter() -> None:
    schedule = schedules.cosine(SchedulerConfig(warmup_steps=2), None, 9)
    forward = [schedule(n) for n in range(1, 10)]
    assert [schedule(n) for n in range(9, 0, -1)] == forward[::-1]


def test_phases_scale_from_their_first_update() -> None:
    schedule = phased(schedules.linear(SchedulerConfig(min_lr_ratio=0.0), None, 10), [(3, 0.1), (6, 2.0)])
    expected = [0.9, 0.8, 0.07, 0.06, 0.05, 0.8, 0.6, 0.4, 0.2, 0.0]
    assert [schedule(n) for n in range(1, 11)] == pytest.approx(expected)
    with pytest.raises(ValueError, match="one after another"):
        phased(schedule, [(3, 1.0), (3, 2.0)])
