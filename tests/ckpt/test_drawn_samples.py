"""A run on samples drawn at random that dies and goes on ends with the bits of one that never stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckptkit import KilledError, assert_same_run, plugins_for, run

from forge_core.contract import Component
from forge_core.data.draws import global_generators
from forge_core.data.source import SourceSpec
from forge_core.plugins import Plugins
from forge_core.testing import TinyRun, plugin_object


class Noise:
    """Ten samples of which only the number stays the same from epoch to epoch."""

    fingerprint = "noise"

    def __init__(self, spec: SourceSpec) -> None:
        self.length = spec.seq_len

    def __len__(self) -> int:
        return 10

    def draw(self, index: int, generator: np.random.Generator) -> Mapping[str, Any]:
        tokens = generator.integers(64, size=self.length + 1)
        with global_generators(generator):
            tokens[torch.rand(len(tokens)).numpy() < 0.3] = index
        return {"tokens": tokens[:-1], "targets": tokens[1:], "positions": np.arange(self.length)}


def build(spec: SourceSpec, options: object) -> Noise:
    return Noise(spec)


def with_noise(kill: int | None = None) -> Plugins:
    component = Component(category="data_source", name="noise", target=f"{__name__}:build")
    return plugins_for(kill, noise=plugin_object(forge_components=lambda: [component]))


def train(folder: Path, workers: int, kill: int | None = None) -> TinyRun:
    data = {"source": "noise/noise", "num_workers": workers}
    model = {"dropout": 0.2, "vocab_size": 64}  # dropout draws from a global generator meanwhile
    return run(folder, plugins=with_noise(kill), steps=8, data=data, model=model, eval={"interval": 3})


@pytest.mark.parametrize("workers", [(0, 0), (2, 0), (0, 2)], ids=str)
def test_killed_and_resumed_equals_straight(workers: tuple[int, int], tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", 0)
    with pytest.raises(KilledError):
        train(tmp_path / "b", workers[0], kill=5)
    resumed = train(tmp_path / "b", workers[1])
    assert_same_run(straight, resumed)
    assert len(resumed.losses) == 4
    assert straight.losses[-4:] == resumed.losses
    evaluated = straight.metric("eval/loss")
    assert evaluated
    assert evaluated[-1] == resumed.metric("eval/loss")[-1]
