"""Several ranks: one checkpoint for all, loaded on any other layout, decided by rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ckptkit import names
from rankskit import apart, blind, dropped, failing, failing_on_one, go, keys_of, late_commit, random_numbers

from forge_ckpt import open_checkpoint
from forge_core.testing import WorkerPool

SHARD2, TP2, ONE = {"dp_shard": 2}, {"tp": 2}, {}
SHARD4, HSDP, BOTH = {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, ONE),
    "FSDP2 on 2": (2, SHARD2),
    "TP on 2": (2, TP2),
    "replicas on 2": (2, {"dp_replicate": 2, "dp_shard": 1}),
    "FSDP2 on 4": (4, SHARD4),
    "HSDP": (4, HSDP),
    "FSDP2 x TP": (4, BOTH),
}


def start(
    pools: dict[int, WorkerPool], layout: str, folder: Path, steps: int, kill: int = 0, **table: Any
) -> list[Any]:
    """What rank 0 of a run gives; all ranks must agree on the step."""
    ranks, sizes = LAYOUTS[layout]
    data_ranks = ranks // sizes.get("tp", 1)
    arguments = (str(folder), sizes, 8 // data_ranks, steps, kill, table)
    if ranks == 1:
        return go(*arguments)
    answers = pools[ranks].run(go, *arguments)
    assert len({answer[0] for answer in answers}) == 1
    return answers[0]


def assert_begins_with(values: dict[str, Any], place: Path) -> None:
    """Weights and moments at the start are those of a checkpoint, in every bit."""
    saved = open_checkpoint(place)
    assert set(values) == set(saved.index.tensors)
    for name, value in values.items():
        stored = saved.tensor(name)
        assert value.dtype == stored.dtype
        assert torch.equal(value, stored), name


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_layout_goes_on_from_every_other(
    optimizer: str, pool2: WorkerPool, pool4: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pools = {2: pool2, 4: pool4}
    table: list[str] = []
    chain = list(LAYOUTS) if optimizer == "adamw" else ["FSDP2 on 2", "one", "FSDP2 x TP", "TP on 2"]
    straight = start(pools, "one", tmp_path / "straight", 2 * len(chain), optimizer=optimizer)
    folder, losses = tmp_path / "chain", []
    for number, layout in enumerate([*chain, chain[0]]):
        begun, found, weights, values = start(
            pools, layout, folder, 2 * len(chain), kill=2 * number + 3, optimizer=optimizer
        )
        assert begun == 2 * number
        if number:
            assert_begins_with(values, folder / f"a/checkpoints/step_{begun:08d}")
            table.append(f"{chain[number - 1]:<14} -> {layout:<14} {len(values)} tensors bit-equal")
        losses += found
    relative = max(
        float((weights[name] - value).abs().max() / value.abs().max()) for name, value in straight[2].items()
    )
    with capsys.disabled():
        print("\n" + "\n".join(table) + f"\nend against one process: {relative:.1e}")
    assert relative < 1e-9


def test_one_checkpoint_of_two_ranks(pool2: WorkerPool, tmp_path: Path) -> None:
    """Sharded tensors are written in parts, whole ones once; the end has the bits of a straight run."""
    pools = {2: pool2}
    straight = start(pools, "FSDP2 on 2", tmp_path / "s", 6)
    start(pools, "FSDP2 on 2", tmp_path / "k", 6, kill=4, mode="async")
    saved = open_checkpoint(tmp_path / "k/a")
    assert saved.manifest.step == 3
    assert saved.manifest.world_size == 2
    assert saved.verify() == []
    parts = {name: len(info.parts) for name, info in saved.index.tensors.items()}
    assert parts["model/embed.weight"] == 2
    assert parts["optimizer/main/embed.weight/step"] == 1
    resumed = start(pools, "FSDP2 on 2", tmp_path / "k", 6)
    assert resumed[0] == 3
    assert resumed[1] == straight[1][3:]
    assert all(torch.equal(w, straight[2][name]) for name, w in resumed[2].items())


@pytest.mark.parametrize("layout", ["FSDP2 on 2", "TP on 2"])
def test_from_one_to_two_and_back(layout: str, pool2: WorkerPool, tmp_path: Path) -> None:
    pools = {2: pool2}
    start(pools, "one", tmp_path, 2)
    _, _, _, values = start(pools, layout, tmp_path, 4)
    assert_begins_with(values, tmp_path / "a/checkpoints/step_00000002")
    begun, _, _, values = start(pools, "one", tmp_path, 6)
    assert begun == 4
    assert_begins_with(values, tmp_path / "a/checkpoints/step_00000004")


def test_each_rank_has_its_own_random_state_back(pool2: WorkerPool, tmp_path: Path) -> None:
    (first, again), (other, other_again) = pool2.run(random_numbers, str(tmp_path))
    assert first[2] == again[0]
    assert other[2] == other_again[0]
    assert first != other


@pytest.mark.parametrize("layout", [{"tp": 2, "sequence_parallel": False}, {"dp_shard": 2}], ids=str)
def test_dropout_after_a_resume_is_that_of_a_run_that_never_stopped(
    layout: dict[str, Any], pool2: WorkerPool, tmp_path: Path
) -> None:
    """Tensor ranks drop the same again, data ranks each its own."""
    rows = 8 if "tp" in layout else 4
    straight = pool2.run(dropped, str(tmp_path / "s"), layout, rows, 0)
    pool2.run(dropped, str(tmp_path / "k"), layout, rows, 3)  # the last save is after 2
    resumed = pool2.run(dropped, str(tmp_path / "k"), layout, rows, 0)
    for (masks, losses), (again, further) in zip(straight, resumed, strict=True):
        assert further == losses[2:]
        assert len(again) == 2
        assert all(torch.equal(mine, mask) for mine, mask in zip(again, masks[2:], strict=True))
        assert 0.1 < float(again[0].float().mean()) < 0.4  # a quarter is dropped in both branches
        assert not torch.equal(again[0], again[1])
    assert torch.equal(resumed[0][0][0], resumed[1][0][0]) == ("tp" in layout)


@pytest.mark.parametrize("layout", [SHARD2, {"dp_replicate": 2, "dp_shard": 1}, TP2], ids=str)
def test_names_do_not_depend_on_the_layout(layout: dict[str, int], pool2: WorkerPool, tmp_path: Path) -> None:
    plain = keys_of(str(tmp_path / "one"), {})
    assert pool2.run(keys_of, str(tmp_path / "two"), layout) == [plain, plain]


def test_rank_0_decides(pool2: WorkerPool, tmp_path: Path) -> None:
    pools = {2: pool2}
    start(pools, "FSDP2 on 2", tmp_path, 3)
    (tmp_path / "a/checkpoints/step_00000099").mkdir()  # newer, and empty
    assert pool2.run(blind, str(tmp_path), timeout=30) == [[3], [3]]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_rank_is_done_before_the_commit(mode: str, pool2: WorkerPool, tmp_path: Path) -> None:
    assert all(seconds >= 0.9 for seconds in pool2.run(late_commit, str(tmp_path), mode))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_rank_that_cannot_write_fails_all(mode: str, pool2: WorkerPool, tmp_path: Path) -> None:
    for error, left in pool2.run(failing, str(tmp_path), mode):
        assert "No space left" in error
        assert left == ["latest", "step_00000001"]
    assert names(tmp_path) == ["latest", "step_00000001"]


@pytest.mark.parametrize(("rank", "what"), [(1, "_copy"), (0, "_texts"), (0, "_unseen")])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_fails_on_one_rank_alone_is_told_to_all(
    rank: int, what: str, mode: str, pool2: WorkerPool, tmp_path: Path
) -> None:
    """Memory for a copy, a state of the run, a look at the files of others: nobody waits for who failed."""
    errors = pool2.run(failing_on_one, str(tmp_path), rank, what, mode, timeout=30)
    assert all("MemoryError: no room" in error for error in errors)
    assert names(tmp_path) == ["latest", "step_00000001"]


def test_ranks_that_do_not_share_a_folder_are_told(pool2: WorkerPool, tmp_path: Path) -> None:
    for error in pool2.run(apart, str(tmp_path)):
        assert "rank 0 does not see" in error
        assert "all ranks must see the same folder" in error
