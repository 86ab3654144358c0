"""The result of a run does not depend on how it was split over ranks and micro-batches."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from distributedkit import Outcome, outcome, train, with_terms

from forge_core.testing import WorkerPool

GLOBAL_BATCH, STEPS = 16, 6
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "FSDP2 on 2": (2, {"dp_shard": 2}),
    "replicas on 2": (2, {"dp_replicate": 2, "dp_shard": 1}),
    "FSDP2 on 4": (4, {"dp_shard": 4}),
    "replicas on 4": (4, {"dp_replicate": 4, "dp_shard": 1}),
    "HSDP on 2 x 2": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "TP 2": (2, {"tp": 2, "sequence_parallel": False}),
    "TP 2, sequence": (2, {"tp": 2}),
    "CP 2": (2, {"cp": 2}),
    "FSDP2 x TP": (4, {"dp_shard": 2, "tp": 2}),
    "FSDP2 x CP": (4, {"dp_shard": 2, "cp": 2}),
    "replicas x CP": (4, {"dp_replicate": 2, "dp_shard": 1, "cp": 2}),
    "CP x TP": (4, {"cp": 2, "tp": 2}),
    "ring of 2": (2, {"cp": 2, "cp_attention": "ring"}),
    "ring of 4": (4, {"cp": 4, "cp_attention": "ring"}),
    "ring x TP": (4, {"cp": 2, "cp_attention": "ring", "tp": 2}),
}
"""Processes and sizes of the mesh."""
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}


@cache
def expected(dtype: str) -> Outcome:
    """One process, one micro-batch a step."""
    return Outcome.of(train({}, GLOBAL_BATCH, 1, dtype, STEPS))


def found(layout: str, accumulate: int, dtype: str, pools: dict[int, WorkerPool]) -> list[Outcome]:
    """The outcome on every rank."""
    world, sizes = LAYOUTS[layout]
    arguments = (sizes, GLOBAL_BATCH // (data_ranks(world, sizes) * accumulate), accumulate, dtype, STEPS)
    if world == 1:
        return [Outcome(*outcome(*arguments))]
    return [Outcome(*values) for values in pools[world].run(outcome, *arguments)]


def data_ranks(world: int, sizes: dict[str, Any]) -> int:
    return world // int(sizes.get("tp", 1) * sizes.get("cp", 1))


def relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)


def differences(got: Outcome, reference: Outcome) -> dict[str, float]:
    """Largest relative differences of losses and norms of all steps, of the norm of the final weights, and
    of any weight over the largest of its tensor."""
    squares = [sum(float(w.double().square().sum()) for w in o.weights.values()) for o in (got, reference)]
    return {
        "loss": max(map(relative, got.losses, reference.losses)),
        "gradient norm": max(map(relative, got.norms, reference.norms)),
        "weight norm": relative(squares[0] ** 0.5, squares[1] ** 0.5),
        "weights": max(
            float((got.weights[name] - w).abs().max() / w.abs().max())
            for name, w in reference.weights.items()
        ),
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "dtype", [pytest.param(name, marks=[] if name == "fp64" else pytest.mark.slow) for name in TOLERANCE]
)
def test_every_split_gives_the_same_losses_and_weights(
    pool2: WorkerPool, pool4: WorkerPool, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    pools = {2: pool2, 4: pool4}
    rows: list[tuple[str, int, str, dict[str, float]]] = []
    for layout in LAYOUTS:
        for accumulate in (1, 4):
            per_rank = found(layout, accumulate, dtype, pools)
            assert all(o.losses == per_rank[0].losses for o in per_rank), layout
            assert all(o.norms == per_rank[0].norms for o in per_rank), layout
            rows.append((layout, accumulate, dtype, differences(per_rank[-1], expected(dtype))))
    with capsys.disabled():
        print("\n" + "\n".join(table(rows)))
    for layout, accumulate, _, values in rows:
        # single precision: Adam's first steps turn the rounding of gradients near 0 into whole steps
        judged = values if dtype == "fp64" else {n: v for n, v in values.items() if n != "weights"}
        assert max(judged.values()) < TOLERANCE[dtype], (layout, accumulate, values)


def table(rows: list[tuple[str, int, str, dict[str, float]]]) -> list[str]:
    """Lines of text."""
    columns = list(rows[0][3])
    lines = [f"{'layout':<16} {'accumulate':>10} {'dtype':>6} " + " ".join(f"{c:>14}" for c in columns)]
    for layout, accumulate, dtype, values in rows:
        numbers = " ".join(f"{values[c]:>14.2e}" for c in columns)
        lines.append(f"{layout:<16} {accumulate:>10} {dtype:>6} {numbers}")
    return lines


def test_the_reference_learns_and_has_rows_without_a_supervised_token() -> None:
    reference: Any = expected("fp64")
    assert len(set(reference.losses)) == STEPS
    start = Outcome.of(train({}, GLOBAL_BATCH, 1, "fp64", 1)).weights
    assert any(not torch.equal(start[name], reference.weights[name]) for name in start)


@pytest.mark.parametrize(
    ("layout", "batch_size", "accumulate", "counted"),
    [
        ({"dp_shard": 2}, 4, 2, 2),
        ({"dp_replicate": 2, "dp_shard": 1}, 8, 1, 2),
        ({"tp": 2, "sequence_parallel": False}, 16, 1, 1),
        ({"tp": 2}, 8, 2, 1),
        ({"cp": 2}, 4, 4, 2),
    ],
)
def test_further_losses_are_those_of_one_process(
    pool2: WorkerPool, layout: dict[str, Any], batch_size: int, accumulate: int, counted: int
) -> None:
    """Objective, losses, reported terms. A metric that reads 1 counts the ranks whose loss is a part."""
    alone = with_terms({}, GLOBAL_BATCH, 1)
    assert alone[0] != alone[1]
    assert len(alone[2]) == len(alone[3]) == 4
    for found_here in pool2.run(with_terms, layout, batch_size, accumulate):
        for mine, reference in zip(found_here[:4], alone[:4], strict=True):
            assert mine == pytest.approx(reference, rel=1e-10)
        assert found_here[4] == [counted] * 4
