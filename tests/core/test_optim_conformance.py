"""Each optimizer of the core through the suite that third parties get."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge_core.config.tables import OptimizerConfig
from forge_core.optim import adamw, lion, muon, schedule_free, skips_on_device
from forge_core.optim.options import AdamWOptions, MuonOptions, ScheduleFreeOptions
from forge_core.testing.optimizers import OptimizerSuite

CONFIG = {"lr": 0.01, "weight_decay": 0.1}


class TestAdamW(OptimizerSuite):
    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return adamw.build(groups, OptimizerConfig(**CONFIG), AdamWOptions())

    def test_skips_on_the_device(self) -> None:
        assert skips_on_device(self.start()[1])


class TestUnfusedAdamW(OptimizerSuite):
    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return adamw.build(groups, OptimizerConfig(**CONFIG), AdamWOptions(fused=False))

    def test_needs_the_host(self) -> None:
        assert not skips_on_device(self.start()[1])


class TestLion(OptimizerSuite):
    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return lion.build(groups, OptimizerConfig(**CONFIG), None)

    def test_skips_on_the_device(self) -> None:
        assert skips_on_device(self.start()[1])


class TestMuon(OptimizerSuite):
    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return muon.build(groups, OptimizerConfig(**CONFIG), MuonOptions())

    def test_skips_on_the_device(self) -> None:
        assert skips_on_device(self.start()[1])


class TestScheduleFreeAdamW(OptimizerSuite):
    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return schedule_free.build(groups, OptimizerConfig(**CONFIG), ScheduleFreeOptions(warmup_steps=2))

    def test_needs_the_host(self) -> None:
        assert not skips_on_device(self.start()[1])


class Leaky(lion.Lion):
    """Multiplies by a mask, which lets 0 * NaN through: the suite has to notice."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        keep = 1.0 - getattr(self, "found_inf", torch.zeros(()))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(keep * group["lr"] * p.grad)


class Unnamed(lion.Lion):
    """Keeps a counter beside its state, which no checkpoint sees."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.01 / self.count
        super().step()


class TestTheSuiteFindsFaults:
    def suite(self, optimizer: type[lion.Lion]) -> OptimizerSuite:
        class Suite(OptimizerSuite):
            def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
                return optimizer(groups, lr=self.lr)

        return Suite()

    def test_a_leaking_mask(self) -> None:
        with pytest.raises(AssertionError, match="leaked"):
            self.suite(Leaky).test_skipped_update_changes_nothing()

    def test_state_outside_the_state(self) -> None:
        with pytest.raises(AssertionError, match="saved in mode"):
            self.suite(Unnamed).test_state_round_trip_by_name()
