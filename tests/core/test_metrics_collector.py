"""One reduction and one read, however many metrics: against values computed by hand."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.contract import Metric
from forge_core.errors import ForgeError
from forge_core.metrics.collector import MetricCollector

READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select")


class Syncs(TorchDispatchMode):
    """Counts what would make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name.split("::")[-1]
        if name in READS:
            self.found[name] += 1
        if name in ("_to_copy", "copy_") and any(
            getattr(a, "device", torch.device("cpu")).type != "cpu" for a in args[:1]
        ):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls that read a tensor on the host without going through the dispatcher."""
    counted: Counter[str] = Counter()
    for name in ("tolist", "item", "numpy", "cpu", "__float__", "__bool__", "__int__"):
        original = getattr(torch.Tensor, name)

        def call(self: Any, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            counted[_name] += 1
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, call)
    return counted


def scalar(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def metric(name: str, op: str, value: Any, finish: Any = None) -> Metric:
    return Metric(name=name, op=op, read=lambda: value, finish=finish)


def test_values_of_every_kind_on_one_process() -> None:
    collector = MetricCollector(
        [
            metric("a/sum", "sum", scalar(3.0)),
            metric("a/max", "max", scalar(7, torch.int64)),
            metric("a/min", "min", scalar(-2.5, torch.float64)),
            metric("a/ratio", "ratio", (scalar(6.0), scalar(4.0))),
            metric("a/root", "sum", scalar(16.0), math.sqrt),
            metric("a/none", "max", None),
            metric("a/empty", "ratio", (scalar(0.0), scalar(0.0))),
            metric("a/flag", "sum", torch.tensor(True)),
        ]
    )
    found = collector.collect(
        values={"train/loss": scalar(2.5), "host": 1.25},
        sums={
            "data/tokens": scalar(2**25 + 1, torch.int64),
            "loss/books": (scalar(9.0), scalar(2, torch.int64)),
        },
        maxima={"memory/peak_gb": 0.5},
    )
    assert found == {
        "train/loss": 2.5,
        "host": 1.25,
        "data/tokens": 2.0**25 + 1,  # lost in fp32
        "loss/books": 4.5,
        "memory/peak_gb": 0.5,
        "a/sum": 3.0,
        "a/max": 7.0,
        "a/min": -2.5,
        "a/ratio": 1.5,
        "a/root": 4.0,
        "a/flag": 1.0,
    }


def test_one_read_on_a_log_step_and_none_before(reads: Counter[str]) -> None:
    asked: list[str] = []

    def read() -> torch.Tensor:
        asked.append("read")
        return weight.square().sum()

    weight = torch.randn(8)
    collector = MetricCollector([Metric(name=f"m{i}", op="sum", read=read) for i in range(20)])
    with Syncs() as syncs:
        sums = {"data/tokens": torch.zeros(())}
        for _ in range(9):
            sums["data/tokens"] += 1
        assert not asked
        assert not syncs.found
        assert not reads
        collector.collect(values={"train/loss": weight.sum()}, sums=sums)
    assert not syncs.found
    assert reads == {"tolist": 1}
    assert len(asked) == 20


def test_nothing_to_collect() -> None:
    assert MetricCollector([]).collect() == {}
    assert MetricCollector([metric("a", "sum", None)]).collect() == {}


def test_not_finite_values_come_through() -> None:
    found = MetricCollector([metric("a", "max", scalar(math.nan))]).collect(values={"b": scalar(math.inf)})
    assert math.isnan(found["a"])
    assert found["b"] == math.inf


def test_keeps_no_graph_and_no_tensor() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = weight.sum() * 2
    alive = weakref.ref(loss)
    collector = MetricCollector([])
    assert collector.collect(values={"train/loss": loss}) == {"train/loss": 6.0}
    del loss
    gc.collect()
    assert alive() is None


def test_refuses_a_clash_and_an_unknown_op() -> None:
    with pytest.raises(ForgeError, match="two metrics are called a/x"):
        MetricCollector([metric("a/x", "sum", None), metric("a/x", "max", None)])
    with pytest.raises(ForgeError, match="unknown op 'mean'"):
        MetricCollector([metric("a/x", "mean", None)])


def on_two_ranks(work: Any) -> list[Any]:
    """Run `work(rank, group)` in two threads that are joined by gloo, whose sockets now and then miss each
    other: then once more."""
    for _ in range(3):
        answers = joined(work)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if not any("connectFullMesh" in str(error) for error in errors):
            break
    for error in errors:
        raise error
    return answers


def joined(work: Any) -> list[Any]:
    """What each rank answers or raises. Work begins when both are connected."""
    store, ready = dist.HashStore(), threading.Barrier(2)
    answers: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            group = dist.ProcessGroup(dist.PrefixStore("pg", store), rank, 2)
            gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, 2)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            ready.wait(30)
            answers[rank] = work(rank, group)
        except BaseException as error:
            ready.abort()
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


def test_two_ranks_with_different_values(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", counted)
    nan, inf = math.nan, math.inf

    def work(rank: int, group: Any) -> dict[str, float]:
        def own(*values: Any) -> Any:
            return None if values[rank] is None else scalar(values[rank])

        collector = MetricCollector(
            [
                metric("sum", "sum", own(1.0, 10.0)),
                metric("sum/one", "sum", own(None, 10.0)),
                metric("sum/none", "sum", None),
                metric("sum/zero", "sum", own(-1.0, 1.0)),
                metric("max", "max", own(-3.0, -4.0)),
                metric("max/one", "max", own(None, -4.0)),
                metric("max/nan", "max", own(nan, 4.0)),
                metric("max/inf", "max", own(inf, 4.0)),
                metric("min", "min", own(3.0, 4.0)),
                metric("min/none", "min", None),
                metric("ratio", "ratio", (own(1.0, 5.0), own(1.0, 3.0))),
                metric("ratio/one", "ratio", (own(2.0, 0.0), own(4.0, 0.0))),
                metric("ratio/none", "ratio", None if rank else (scalar(0.0), scalar(0.0))),
                metric("finished", "sum", own(9.0, 16.0), math.sqrt),
            ],
            group=group,
        )
        names = ["x", "y"] if rank else ["y", "x"]
        return collector.collect(
            values={"train/loss": scalar(2.5)},
            sums={name: own(*((1.0, 2.0) if name == "x" else (3.0, 4.0))) for name in names},
            maxima={"memory/peak_gb": (0.5, 0.25)[rank]},
        )

    first, second = on_two_ranks(work)
    expected = {
        "train/loss": 2.5,
        "x": 3.0,
        "y": 7.0,
        "memory/peak_gb": 0.5,
        "sum": 11.0,
        "sum/one": 10.0,
        "sum/zero": 0.0,
        "max": -3.0,
        "max/one": -4.0,
        "max/inf": inf,
        "min": 3.0,
        "ratio": 1.5,
        "ratio/one": 0.5,
        "finished": 5.0,
    }
    for found in (first, second):
        assert math.isnan(found.pop("max/nan"))
        assert found == expected
    assert len(calls) == 2  # one on each rank


def test_no_collective_when_all_is_known_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda *a, **k: pytest.fail("a collective"))

    def work(rank: int, group: Any) -> dict[str, float]:
        return MetricCollector([], group=group).collect(values={"train/loss": scalar(1.0)})

    assert on_two_ranks(work) == [{"train/loss": 1.0}] * 2


def test_which_rank_has_the_largest_number_and_ranks_that_are_copies() -> None:
    def work(rank: int, group: Any) -> dict[str, float]:
        collector = MetricCollector(
            [
                metric("sum", "sum", scalar(1.0 + rank)),
                metric("ratio", "ratio", (scalar(3.0), scalar(2.0 + rank))),
                metric("max", "max", scalar(float(rank))),
            ],
            group=group,
            counts=rank == 0,  # rank 1 holds the same shares
        )
        return collector.collect(
            values={"train/loss": scalar(2.5)},
            sums={"x": scalar(4.0)},
            maxima={"memory/peak_gb": float(rank)},
            locate={"slowest": (0.25, 0.5)[rank], "quickest": (-0.25, -0.5)[rank]},
        )

    expected = {
        "train/loss": 2.5,
        "x": 4.0,
        "memory/peak_gb": 1.0,
        "sum": 1.0,
        "ratio": 1.5,
        "max": 1.0,
        "slowest": 1.0,
        "quickest": 0.0,
    }
    assert on_two_ranks(work) == [expected, expected]
    assert MetricCollector([]).collect(locate={"slowest": 7.0}) == {"slowest": 0.0}
