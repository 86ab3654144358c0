"""Experts in a model that is cut into stages: the same run as in one process, under every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from forge_core.plugins import Candidate, Plugins
from forge_core.testing import WorkerPool, plugin_object

pytestmark = pytest.mark.packages("moe", "pp")
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)
ALWAYS = (("1f1b", "padded", "exact"), ("zbv", "padded", "sequence"), ("interleaved_1f1b", "rows", "exact"))
_wholes: dict[str, Any] = {}


def cut(ranks: int, schedule: str, moe: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Four layers, two micro-batches a stage at least."""
    from moeruns import tables

    model = {"n_kv_heads": 2, "ffn_hidden_dim": 24, "n_layers": 4}
    found = tables(ranks, 4 // ranks, model=model, moe=moe or {}, **more)
    return {**found, "pp": {"size": 2, "schedule": schedule}} if schedule else found


def padded_data(session: Any) -> Any:
    """Packed documents, uneven masks, rows that end in padding; of four micro-batches one has no target and
    one no token at all."""
    from ppkit import Data, Stream

    class Padded(Stream):
        def batch(self, number: int) -> dict[str, Any]:
            batch = super().batch(number)
            rows, length = batch["tokens"].shape
            ends = torch.tensor([length - 5 * ((number + row) % 3) for row in range(rows)])
            valid = torch.arange(length) < ends[:, None] * (number % 4 != 2)
            batch["targets"][~valid] = -100
            batch["documents"] = batch["documents"].masked_fill(~valid, 99)
            return {**batch, "valid": valid}

    data = Data("packed+masked+unsupervised", session)
    data.train, data.evaluation = Padded("packed+masked+unsupervised", session), []
    return data


def run(tables: dict[str, Any]) -> dict[str, Any]:
    """A run that may name the data above by a table."""
    import moeruns

    plugin = plugin_object(forge_build_data=padded_data)
    mine = Candidate(name="padded", source="test", version="0", loaded=plugin)
    return moeruns.run(tables, Plugins(installed=[*Plugins().installed, mine]))


def compare(pool: WorkerPool, one: dict[str, Any], many: dict[str, Any]) -> None:
    from moeruns import same_on_all

    key = repr(one)
    if key not in _wholes:
        _wholes[key] = run(one)
    same_on_all(pool.run(run, many, timeout=100), _wholes[key])


def cells() -> Iterator[Any]:
    """Every schedule, with whole rows and with padded ones, and each balance loss that adds up."""
    for schedule in SCHEDULES:
        for data in ("rows", "padded"):
            for aux_loss in ("sequence", "exact"):
                cell = (schedule, data, aux_loss)
                yield pytest.param(*cell, marks=() if cell in ALWAYS else pytest.mark.slow)


@pytest.mark.parametrize(("schedule", "data", "aux_loss"), list(cells()))
def test_stages_have_the_losses_and_biases_of_one_process(
    pool2: WorkerPool, schedule: str, data: str, aux_loss: str
) -> None:
    """Losses are attached to the weights of the router, where every schedule finds them."""
    more = {} if data == "rows" else {"padded": {}, "eval": {"interval": 0, "at_end": False}}
    moe = {"aux_loss": aux_loss}
    compare(pool2, cut(1, "", moe, **more), cut(1, schedule, moe, **more))


def test_micro_batches_of_stages_are_one_big_batch(pool2: WorkerPool) -> None:
    """Four rows at once in one process, one after another through the stages."""
    from moeruns import tables

    moe = {"aux_loss": "exact"}
    model = {"n_kv_heads": 2, "ffn_hidden_dim": 24, "n_layers": 4}
    compare(pool2, tables(model=model, moe=moe), cut(1, "gpipe", moe))


def counted_and_trained(tables: dict[str, Any]) -> list[tuple[list[float], list[float]]]:
    """Of each update and layer of this rank: how often each expert was chosen when routes were counted, and
    when they were trained on."""
    from forge_core.testing import run_tiny, tiny_config
    from forge_moe.balance import Balance

    found: list[tuple[list[float], list[float]]] = []
    after = Balance.after_update

    def told(self: Balance, step: int, ok: Any) -> None:
        for layer in self.layers:
            assert layer.step_counts is not None
            found.append((layer.step_counts.tolist(), layer.tally[: layer.moe.num_experts].tolist()))
        after(self, step, ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Balance, "after_update", told)
        plugins = Plugins()
        run_tiny(tiny_config(plugins=plugins, **tables), plugins, steps=2)
    return found


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", pytest.param("zbv", marks=pytest.mark.slow)])
def test_noise_is_the_same_when_routes_are_counted(pool2: WorkerPool, schedule: str) -> None:
    """Two stages a rank, which a schedule runs in another order than a forward alone does. With dropout what
    reaches a router is random, too."""
    tables = cut(1, schedule, {"aux_loss": "exact", "jitter": 0.4})
    tables["model"]["dropout"] = 0.2
    ranks = pool2.run(counted_and_trained, tables, timeout=100)
    assert [len(rank) for rank in ranks] == [4, 4]
    for counted, trained in (pair for rank in ranks for pair in rank):
        assert sum(counted) > 0
        assert counted == trained


@pytest.mark.slow
@pytest.mark.parametrize("aux_loss", ["sequence", "global", "exact"])
def test_stages_beside_divided_experts(pool4: WorkerPool, aux_loss: str) -> None:
    """`global` is over micro-batches of all data ranks, of which one process makes one."""
    moe = {"aux_loss": aux_loss}
    whole = cut(1, "", moe)
    if aux_loss == "global":
        whole["train"] |= {"batch_size": 2, "grad_accum_steps": 2}
    compare(pool4, whole, cut(2, "1f1b", {**moe, "ep": 2}))


@pytest.mark.slow
def test_a_stage_without_experts_counts_along(pool2: WorkerPool) -> None:
    moe = {"aux_loss": "exact", "layers": [1]}
    compare(pool2, cut(1, "", moe), cut(1, "1f1b", moe))


def test_every_schedule_is_among_them() -> None:
    from forge_pp import schedules

    assert set(SCHEDULES) == schedules.SCHEDULES.keys()
