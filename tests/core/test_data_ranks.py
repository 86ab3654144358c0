"""Data on two processes: who reads which samples, who draws which numbers, and data that cannot be used."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from datakit import Numbers

from forge_core.contract import Component, Transform
from forge_core.data.order import ShuffledOrder
from forge_core.data.source import SourceSpec
from forge_core.data.stream import SampleStream
from forge_core.testing import WorkerPool, isolated_plugins, plugin_object, run_tiny, tiny_config
from forge_core.testing.pool import WorkerError

LENGTH = 8


class Numbered:
    """Every token of sample i is i."""

    def __init__(self, count: int) -> None:
        self.count, self.fingerprint = count, f"numbered {count}"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = np.full(LENGTH, index)
        return {"tokens": row, "targets": row, "positions": np.arange(LENGTH)}


def eight(spec: SourceSpec, options: object) -> Numbered:
    return Numbered(8)


def twenty(spec: SourceSpec, options: object) -> Numbered:
    return Numbered(20)


def trained_on(layout: dict[str, Any], source: str, steps: int, workers: int = 0, seed: int = 1) -> list[int]:
    """Numbers of the samples that this rank's model is given by a run with micro-batches of one."""
    seen: list[int] = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        tokens = args[0] if args else kwargs["tokens"]
        seen.extend(tokens[:, 0].tolist())

    def apply(model: Any) -> Any:
        model.register_forward_pre_hook(look, with_kwargs=True)
        return model

    plugin = plugin_object(
        forge_components=[
            Component(category="data_source", name=source, target=f"test_data_ranks:{source}"),
        ],
        forge_model_transforms=lambda: [Transform(phase="adapt", name="look", apply=apply)],
    )
    plugins = isolated_plugins({"kit": plugin})
    train = {"batch_size": 1, "seq_len": LENGTH, "max_steps": steps, "seed": seed}
    data = {"source": f"kit/{source}", "holdout": 0.0, "num_workers": workers}
    tables: dict[str, Any] = {"distributed": layout, "train": train, "data": data, "eval": {"at_end": False}}
    run_tiny(tiny_config(plugins=plugins, kit=True, model={"vocab_size": 40}, **tables), plugins)
    return seen


DATA_RANKS: list[dict[str, Any]] = [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}]
ONE_SAMPLE: list[dict[str, Any]] = [{"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"cp": 2}]


@pytest.mark.parametrize("layout", DATA_RANKS, ids=str)
def test_data_ranks_share_out_every_epoch(pool2: WorkerPool, layout: dict[str, Any]) -> None:
    """20 samples, one a rank and update: ten updates an epoch, in which nobody reads what another does."""
    first, second = pool2.run(trained_on, layout, "twenty", 30)
    epochs = [(first[k : k + 10], second[k : k + 10]) for k in (0, 10, 20)]
    for mine, others in epochs:
        assert len(mine) == len(others) == 10
        assert not set(mine) & set(others)
        assert sorted(mine + others) == list(range(20))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert pool2.run(trained_on, layout, "twenty", 30) == [first, second]
    assert pool2.run(trained_on, layout, "twenty", 10, 0, 2) != [first[:10], second[:10]]


@pytest.mark.parametrize("layout", ONE_SAMPLE, ids=str)
def test_ranks_that_divide_a_sample_read_the_same(pool2: WorkerPool, layout: dict[str, Any]) -> None:
    first, second = pool2.run(trained_on, layout, "twenty", 60)
    assert first == second == trained_on({}, "twenty", 60)
    for k in (0, 20, 40):
        assert sorted(first[k : k + 20]) == list(range(20))


def test_one_shard_for_two_readers_is_read_once(pool2: WorkerPool) -> None:
    """Eight samples in one piece: for two ranks, for two processes of each, and for two of one."""
    for workers in (0, 2):
        first, second = pool2.run(trained_on, {"dp_shard": 2}, "eight", 4, workers)
        assert sorted(first + second) == list(range(8))
        assert len(first) == len(second) == 4
    assert sorted(trained_on({}, "eight", 8, 2)) == list(range(8))


class Draws(Numbers):
    """Each sample holds a draw of NumPy and one of Python, and the process that made them."""

    batch = None  # type: ignore[assignment]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        drawn = [np.random.random(), random.random()]
        return {"tokens": np.array([index]), "drawn": np.array(drawn), "process": np.array([os.getpid()])}


def first_draws() -> tuple[list[list[float]], list[int]]:
    """This rank's first draws of two processes that read, in two epochs, and the processes."""
    source = Draws(8)
    stream = SampleStream(
        [source], ShuffledOrder(8, 0), batch_size=1, data_rank=dist.get_rank(), data_size=2, workers=2
    )
    with closing(stream):
        steps = [stream.take(1)[0] for _ in range(8)]  # two epochs of four steps, read by turns
    firsts = [steps[i] for i in (0, 1, 4, 5)]
    return [each["drawn"][0].tolist() for each in firsts], [int(each["process"][0]) for each in firsts]


def test_ranks_and_processes_that_read_draw_numbers_of_their_own_in_every_epoch(pool2: WorkerPool) -> None:
    """2 ranks x 2 processes x 2 epochs: eight first draws, all different, and the same in another run."""
    found = pool2.run(first_draws)
    processes = [process for _, each in found for process in each]
    assert len(set(processes)) == 4
    assert all(each[:2] == each[2:] and each[0] != each[1] for _, each in found)
    for generator in range(2):
        assert len({draw[generator] for draws, _ in found for draw in draws}) == 8
    again = pool2.run(first_draws)
    assert [draws for draws, _ in again] == [draws for draws, _ in found]
    assert not {process for _, each in again for process in each} & set(processes)


def shards(folder: Path, fault: str) -> None:
    """Two files of tokens, of which the second has a fault."""
    row = np.random.default_rng(0).integers(0, 257, 4000).astype(np.uint16)
    np.save(folder / "a.npy", row)
    np.save(folder / "b.npy", row.astype(np.uint32) if fault == "type" else row)
    if fault == "vocabulary":
        np.save(folder / "b.npy", np.append(row, np.uint16(300)))
    if fault == "cut short":
        content = (folder / "b.npy").read_bytes()
        (folder / "b.npy").write_bytes(content[: len(content) // 2])
    if fault == "empty":
        np.save(folder / "b.npy", row[:0])


FAULTS = {
    "cut short": "b.npy is cut short: its header promises 4000 tokens of uint16",
    "type": "b.npy holds uint32, ",
    "vocabulary": "b.npy: token id 300 does not fit model.vocab_size = 257",
    "empty": "b.npy holds no tokens",
}


def opens(first: str, second: str) -> None:
    """A run whose data lies in `first` for rank 0, in `second` for rank 1."""
    path = [first, second][dist.get_rank()]
    data = {"source": "tokens", "path": "tokens", "holdout": 0.0}
    cwd = Path.cwd()
    os.chdir(path)  # ranks with different paths would be refused for that
    try:
        run_tiny(tiny_config(data=data, distributed={"dp_shard": 2}))
    finally:
        os.chdir(cwd)


@pytest.mark.parametrize("where", ["everywhere", "on rank 1"])
@pytest.mark.parametrize("fault", FAULTS)
def test_shards_that_cannot_be_used_end_all_ranks(
    pool2: WorkerPool, tmp_path: Path, fault: str, where: str
) -> None:
    for name, which in (("good", ""), ("bad", fault)):
        (tmp_path / name / "tokens").mkdir(parents=True)
        shards(tmp_path / name / "tokens", which)
    good, bad = str(tmp_path / "good"), str(tmp_path / "bad")
    with pytest.raises(WorkerError) as caught:
        pool2.run(opens, bad if where == "everywhere" else good, bad, timeout=20)
    failures = caught.value.failures
    assert [failures[rank].kind for rank in (0, 1)] == ["DataError", "DataError"]
    assert all(FAULTS[fault] in failure.text for failure in failures.values()), failures
    assert ("rank 1 cannot open its data" in failures[0].text) == (where == "on rank 1")
