"""The ranks of a pipeline read the same samples, each once an epoch, as one process does."""

from __future__ import annotations

from typing import Any

import numpy as np

import forge_pp.plugin
from forge_core.contract import Component, Observer
from forge_core.data.source import SourceSpec
from forge_core.testing import WorkerPool, isolated_plugins, plugin_object, run_tiny, tiny_config

LENGTH = 8


class Numbered:
    """20 samples; every token of sample i is i."""

    fingerprint = "numbered"

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = np.full(LENGTH, index)
        return {"tokens": row, "targets": row, "positions": np.arange(LENGTH)}


def numbered(spec: SourceSpec, options: object) -> Numbered:
    return Numbered()


class Reads(Observer):
    """Samples that this rank takes from its stream."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def train_begin(self, session: Any) -> None:
        take = session.stream.take

        def recorded(count: int) -> Any:
            batches = take(count)
            self.ids += [i for batch in batches for i in batch["tokens"][:, 0].tolist()]
            return batches

        session.stream.take = recorded


def read(tables: dict[str, Any]) -> list[int]:
    """Three epochs, of micro-batches of one."""
    reads = Reads()
    kit = plugin_object(
        forge_components=[Component(category="data_source", name="n", target="test_pp_samples:numbered")],
        forge_observers=lambda: [reads],
    )
    plugins = isolated_plugins({"pp": forge_pp.plugin, "kit": kit})
    train = {"batch_size": 1, "grad_accum_steps": 4, "max_steps": 15, "seq_len": LENGTH}
    config = tiny_config(
        plugins=plugins,
        kit=True,
        train=train,
        model={"vocab_size": 32},
        data={"source": "kit/n", "holdout": 0.0},
        eval={"at_end": False},
        **tables,
    )
    run_tiny(config, plugins)
    return reads.ids


def test_stages_read_the_same_samples(pool2: WorkerPool) -> None:
    first, second = pool2.run(read, {"pp": {"size": 2}})
    assert first == second == read({})
    for start in (0, 20, 40):
        assert sorted(first[start : start + 20]) == list(range(20))
