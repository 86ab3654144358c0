"""Which samples a run reads after it went on from a checkpoint, by their numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rankskit import ids_of

from forge_ckpt.errors import RefusedError
from forge_core.errors import DataError
from forge_core.testing import WorkerPool

OF_32: dict[str, Any] = {"source": "test/ids32"}
PHASES: dict[str, Any] = {
    "source": "synthetic",
    "mix": [{"name": "low", "source": "test/low"}, {"name": "high", "source": "test/high"}],
    "phases": [
        {"start_step": 1, "weights": {"low": 1.0, "high": 0.0}},
        {"start_step": 5, "weights": {"low": 0.0, "high": 1.0}},
    ],
}


def flat(updates: list[list[int]]) -> list[int]:
    return [i for update in updates for i in update]


def test_one_rank_reads_what_two_have_left(pool2: WorkerPool, tmp_path: Path) -> None:
    """32 samples, two ranks with two each; after two updates 24 are left of the epoch; each comes once."""
    ranks = pool2.run(ids_of, str(tmp_path), OF_32, {"dp_shard": 2}, 2, 8, 3)  # the last save is after 2
    used = {i for rank in ranks for i in flat(rank[:2])}
    assert len(used) == 8
    left = flat(ids_of(str(tmp_path), OF_32, {}, 4, 8, 0))
    assert len(left) == 24
    assert sorted(left) == sorted(set(range(32)) - used)


def test_two_ranks_read_what_one_has_left(pool2: WorkerPool, tmp_path: Path) -> None:
    used = flat(ids_of(str(tmp_path), OF_32, {}, 4, 8, 3)[:2])
    ranks = pool2.run(ids_of, str(tmp_path), OF_32, {"dp_shard": 2}, 2, 8, 0)
    left = [i for rank in ranks for i in flat(rank)]
    assert [len(rank) for rank in ranks] == [6, 6]
    assert sorted(left) == sorted(set(range(32)) - set(used))


def test_what_would_read_other_samples_is_noticed(tmp_path: Path) -> None:
    ids_of(str(tmp_path), OF_32, {}, 4, 8, 3)
    with pytest.raises(RefusedError, match=r"an update took 4 sequences in .*, it takes 2 now"):
        ids_of(str(tmp_path), OF_32, {}, 2, 8, 0)
    with pytest.raises(RefusedError, match=r"train\.seed: was 1 in .*, is 2"):
        ids_of(str(tmp_path), OF_32, {}, 4, 8, 0, seed=2)
    with pytest.raises(DataError, match="32") as caught:
        ids_of(str(tmp_path), {"source": "test/ids40"}, {}, 4, 8, 0)
    assert "40" in str(caught.value)


@pytest.mark.parametrize(("source", "workers"), [("ids40", 2), ("flow40", 1)])
def test_what_was_read_ahead_does_not_count(source: str, workers: int, tmp_path: Path) -> None:
    """Saved after update 5 while the next batches were read already: the next one is the sixth."""
    data = {"source": f"test/{source}", "num_workers": workers, "prefetch": 4}
    straight = ids_of(str(tmp_path / "straight"), data, {}, 2, 12, 0)
    assert len({i for update in straight for i in update}) == 24
    ids_of(str(tmp_path / "b"), data, {}, 2, 12, 6)
    assert ids_of(str(tmp_path / "b"), data, {}, 2, 12, 0) == straight[5:]


@pytest.mark.parametrize("saved_after", [3, 4, 5, 6])
def test_a_phase_begins_with_its_update(saved_after: int, tmp_path: Path) -> None:
    """Samples below 100 up to update 4, from 1000 on after it, wherever the run was interrupted."""
    head = ids_of(str(tmp_path), PHASES, {}, 2, 10, saved_after + 1)[:saved_after]
    joined = head + ids_of(str(tmp_path), PHASES, {}, 2, 10, 0)
    assert len(joined) == 10
    assert all(i < 100 for i in flat(joined[:4]))
    assert all(i >= 1000 for i in flat(joined[4:]))
    assert joined == ids_of(str(tmp_path / "straight"), PHASES, {}, 2, 10, 0)
