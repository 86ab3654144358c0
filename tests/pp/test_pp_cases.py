"""Faults that pipelines of other trainers had, each as a small case with its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ppkit import BASE, alone, differences, merged, on_ranks, run
from torch import nn

from forge_core.contract import MeshAxis, Observer
from forge_core.distributed.mesh import Mesh
from forge_core.loop.clip import GlobalNorm
from forge_core.loop.evaluate import evaluate
from forge_core.testing import WorkerPool, plugin_object
from forge_pp.schedules import SCHEDULES, count_problems

SGD: dict[str, Any] = {
    "optimizer": {"name": "plain/sgd", "lr": 0.1},
    "scheduler": {"name": "constant"},
    "plain": {},
}


def norm_of_low_precision() -> float:
    """The norm over two stages, one of which has 10000 bf16 gradients of 0.01."""
    rank = torch.distributed.get_rank()
    axes = [MeshAxis(name="pp", size=2, place=10, loss_differs=True, params_differ=True)]
    mesh = Mesh(axes, rank=rank, world_size=2, connected=True)
    model = nn.Linear(100, 100, bias=False, dtype=torch.bfloat16)
    model.weight.grad = torch.full_like(model.weight, 0.01 * (rank == 0))
    norm, _ = GlobalNorm(model, mesh, world_size=2)([model.weight])
    return float(norm)


def test_the_norm_of_low_precision_is_added_up_in_high(pool2: WorkerPool) -> None:
    # the bf16 number next to 0.01 is 0.010009765625
    assert pool2.run(norm_of_low_precision) == [pytest.approx(1.00098, rel=1e-5)] * 2


def test_a_shape_that_changes_inside_a_window_keeps_gradients(pool2: WorkerPool) -> None:
    """Micro-batches of 8 and of 4 tokens; what is set up anew for the second must not wipe the first."""
    train = {"train": {"grad_accum_steps": 2, "max_steps": 1, "dtype": "fp32"}}
    tables = merged(BASE, SGD, train, {"data_halves": {}, "eval": {"at_end": False}})
    whole = alone(tables)
    ranks = pool2.run(on_ranks, merged(tables, {"pp": {"size": 2}}))
    for rank in ranks:
        assert rank["norms"] == pytest.approx(whole["norms"], rel=1e-5)
    second = merged(tables, {"train": {"grad_accum_steps": 1}})
    del second["data_halves"]
    (last,) = alone({**second, "data_halves_late": {}})["norms"]
    for share in (1.0, 8 / 24):  # by its own tokens, and by those of the window
        assert abs(last * share / ranks[0]["norms"][0] - 1) > 0.1


def counts() -> list[Any]:
    found = []
    for name, schedule in SCHEDULES.items():
        for count in (1, 3, 8):
            if not list(count_problems(schedule, 2, 2 * schedule.stages, count)):
                always = (name, count) in {("gpipe", 1), ("1f1b", 3), ("looped_bfs", 1), ("zbv", 3)}
                found.append(pytest.param(name, count, marks=() if always else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("schedule", "count"), counts())
def test_any_number_of_micro_batches_that_is_not_refused(
    schedule: str, count: int, pool2: WorkerPool
) -> None:
    tables = merged(BASE, {"train": {"grad_accum_steps": count, "max_steps": 2}})
    ranks = pool2.run(on_ranks, merged(tables, {"pp": {"size": 2, "schedule": schedule}}))
    found = differences(alone(tables), ranks)
    assert max(found.values()) < 1e-10, found


class EvaluatesFirst(Observer):
    """Evaluates before the first update, and counts the gradients that are there afterwards."""

    loss = 0.0
    gradients = 0

    def train_begin(self, session: Any) -> None:
        self.loss = evaluate(session)["eval/loss"]
        self.gradients = sum(p.grad is not None for p in session.model.parameters())


def evaluated(tables: dict[str, Any]) -> dict[str, Any]:
    """Three updates between two evaluations on batches with 4, 2 and 1 supervised tokens."""
    first = EvaluatesFirst()
    done = run(tables, watch=plugin_object(forge_observers=lambda: [first]))
    with torch.no_grad():
        last = evaluate(done.session)["eval/loss"]
    left = sum(p.grad is not None and bool(p.grad.any()) for p in done.session.model.parameters())
    return {"losses": done.losses, "first": first.loss, "last": last, "left": first.gradients + left}


def test_evaluations_before_and_after_training(pool2: WorkerPool) -> None:
    short = {"train": {"max_steps": 3}, "eval": {"interval": 0}, "data_masked_unsupervised": {}}
    tables = merged(BASE, short)
    whole = evaluated({**tables, "watch": {}})
    split = {**tables, "pp": {"size": 2}}
    never = pool2.run(on_ranks, merged(split, {"eval": {"at_end": False}}))
    for rank, other in zip(pool2.run(evaluated, {**split, "watch": {}}), never, strict=True):
        assert rank["first"] == pytest.approx(whole["first"], rel=1e-6)
        assert rank["last"] == pytest.approx(whole["last"], rel=1e-6)
        assert rank["left"] == 0
        assert rank["losses"] == other["losses"]


class Copies(Observer):
    """The tied weight of this rank after each update."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def step_end(self, session: Any, step: int, result: Any) -> None:
        self.found.append(session.freeze.named["embed.weight"].detach().clone())


def tied(tables: dict[str, Any]) -> dict[str, Any]:
    copies = Copies()
    done = run(tables, watch=plugin_object(forge_observers=lambda: [copies]))
    return {"copies": copies.found, "norms": done.grad_norms, "weights": done.weights}


def test_copies_of_a_tied_embedding_stay_one(pool2: WorkerPool) -> None:
    model = {"vocab_size": 11, "dim": 4, "ffn_hidden_dim": 8, "n_layers": 2, "tie_embeddings": True}
    train = {"max_steps": 3, "dtype": "fp32", "grad_clip_norm": 1.0}
    tables = {**merged(BASE, SGD, {"model": model, "train": train}), "watch": {}}
    whole = tied(tables)
    first, last = pool2.run(tied, {**tables, "pp": {"size": 2}})
    assert len(first["copies"]) == 3
    for one, other, expected in zip(first["copies"], last["copies"], whole["copies"], strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected, rtol=1e-6, atol=1e-6)
    assert first["norms"] == last["norms"] == pytest.approx(whole["norms"], rel=1e-6)
