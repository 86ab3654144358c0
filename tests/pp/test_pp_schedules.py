"""Every schedule gives the update of one process, whatever the model and the data are."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from ppkit import BASE, alone, differences, merged, on_ranks

from forge_core.testing import WorkerPool
from forge_pp.schedules import SCHEDULES

TOLERANCE = 1e-10
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"model": {"tie_embeddings": True}},
    "packed documents, uneven masks, no target": {"data_packed_masked_unsupervised": {}},
    "lengths that change": {"data_packed_lengths_masked": {}},
    "tied, lengths that change": {"model": {"tie_embeddings": True}, "data_packed_lengths_masked": {}},
}
if find_spec("forge_moe"):
    FAMILIES["experts"] = {"moe": {"num_experts": 4, "top_k": 2, "expert_hidden_dim": 16}}
_wholes: dict[str, dict[str, Any]] = {}
_table: dict[str, dict[str, float]] = {}


def compare(pool: WorkerPool, tables: dict[str, Any]) -> dict[str, float]:
    key = repr(sorted((name, keys) for name, keys in tables.items() if name != "pp"))
    if key not in _wholes:
        _wholes[key] = alone(tables)
    return differences(_wholes[key], pool.run(on_ranks, tables))


def cells() -> Iterator[Any]:
    """Every schedule with every family; a third of them, all schedules and families among it, runs always."""
    for row, schedule in enumerate(SCHEDULES):
        for column, family in enumerate(FAMILIES):
            always = (row + column) % 3 == 0
            yield pytest.param(schedule, family, marks=() if always else pytest.mark.slow)


@pytest.mark.parametrize(("schedule", "family"), list(cells()))
def test_two_ranks_equal_one_process(schedule: str, family: str, pool2: WorkerPool) -> None:
    tables = merged(BASE, FAMILIES[family], {"pp": {"size": 2, "schedule": schedule}})
    found = compare(pool2, tables)
    _table.setdefault(schedule, {})[family] = max(found.values())
    assert max(found.values()) < TOLERANCE, found


def test_table() -> None:
    """Prints the largest relative difference of every cell (`pytest -s`)."""
    width = max(map(len, SCHEDULES))
    print("\n" + " " * width, *(f"| {family}" for family in FAMILIES))
    for schedule, row in _table.items():
        print(f"{schedule:<{width}}", *(f"| {row.get(f, float('nan')):<{len(f)}.1e}" for f in FAMILIES))
