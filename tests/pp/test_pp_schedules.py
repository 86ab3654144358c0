"""Every schedule gives the update of one process."""

from __future__ import annotations

from typing import Any

import pytest
from ppkit import BASE, alone, differences, merged, on_ranks

from forge_core.testing import WorkerPool
from forge_pp.schedules import SCHEDULES

TOLERANCE = 1e-10
_wholes: dict[str, dict[str, Any]] = {}


def compare(pool: WorkerPool, tables: dict[str, Any]) -> dict[str, float]:
    key = repr(sorted((name, keys) for name, keys in tables.items() if name != "pp"))
    if key not in _wholes:
        _wholes[key] = alone(tables)
    return differences(_wholes[key], pool.run(on_ranks, tables))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dense_text(schedule: str, pool2: WorkerPool) -> None:
    tables = merged(BASE, {"pp": {"size": 2, "schedule": schedule}})
    found = compare(pool2, tables)
    assert max(found.values()) < TOLERANCE, found
