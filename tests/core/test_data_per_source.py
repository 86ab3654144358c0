"""Loss and tokens of each source: global, from the losses of training, in one read with the others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core import run_training_loop
from forge_core.contract import Output, StepResult
from forge_core.data.per_source import SourcedForward, SourceLosses
from forge_core.testing import WorkerPool, run_tiny, tiny_config, tiny_session

MIX = [
    {"name": "low", "source": "synthetic", "weight": 3.0, "synthetic": {"n_samples": 300, "vocab_size": 5}},
    {"name": "all", "source": "synthetic", "weight": 1.0, "synthetic": {"n_samples": 300}},
]
WANTED = ("train/loss", "loss/low", "loss/all", "data/low/tokens", "data/all/tokens")


def run_mixture(batch_size: int, accumulate: int, layout: dict[str, Any], interval: int) -> Any:
    config = tiny_config(
        data={"mix": MIX, "holdout": 0.1},
        train={"batch_size": batch_size, "grad_accum_steps": accumulate, "max_steps": 6, "dtype": "fp64"},
        metrics={"log_interval": interval},
        distributed=layout,
    )
    run = run_tiny(config)
    return [{name: record[name] for name in WANTED if name in record} for record in run.records]


def test_sources_add_up_to_the_loss_of_the_step() -> None:
    records = run_mixture(4, 2, {}, 1)[:6]
    low = all_ = 0.0
    for record in records:
        a, b = record["data/low/tokens"] - low, record["data/all/tokens"] - all_
        low, all_ = record["data/low/tokens"], record["data/all/tokens"]
        assert a + b == 8 * 16
        parts = a * record.get("loss/low", 0.0) + b * record.get("loss/all", 0.0)
        assert parts / (a + b) == pytest.approx(record["train/loss"], rel=1e-6)
    assert low == 3 * all_ == 0.75 * 6 * 8 * 16


def test_loss_between_logs_is_the_mean_over_all_tokens_since() -> None:
    each, some = run_mixture(4, 2, {}, 1), run_mixture(4, 2, {}, 3)
    assert some[1]["data/all/tokens"] == each[2]["data/all/tokens"]
    # logged after steps 1, 3 and 6: the second covers steps 2 and 3
    total = tokens = 0.0
    for step in (1, 2):
        count = each[step]["data/all/tokens"] - each[step - 1]["data/all/tokens"]
        total, tokens = total + count * each[step].get("loss/all", 0.0), tokens + count
    assert some[1]["loss/all"] == pytest.approx(total / tokens, rel=1e-6)


LAYOUTS = [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}, {"tp": 2}, {"cp": 2}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_numbers_are_those_of_one_process(pool2: WorkerPool, layout: dict[str, int]) -> None:
    alone = run_mixture(8, 1, {}, 1)
    split = 1 if "tp" in layout or "cp" in layout else 2
    for records in pool2.run(run_mixture, 4, 2 // split, layout, 1)[:1]:
        for record, expected in zip(records[:6], alone[:6], strict=True):
            assert record.keys() == expected.keys()
            for name in record:
                assert record[name] == pytest.approx(expected[name], rel=1e-6)


def test_refused_update_does_not_count_and_evaluation_neither() -> None:
    losses = SourceLosses(["a", "b"], torch.device("cpu"))

    def inner(model: Any, batch: dict[str, Any]) -> Output:
        token_loss = batch["loss"]
        return Output(loss_sum=token_loss.sum(), token_loss=token_loss)

    inner.count = lambda batch: {"tokens": 3}  # type: ignore[attr-defined]
    forward = SourcedForward(inner, losses)  # type: ignore[arg-type]
    batch = {
        "targets": torch.tensor([[1, -100], [2, 2]]),
        "sources": torch.tensor([1, 0]),
        "loss": torch.tensor([[5.0, 0.0], [1.0, 3.0]]),
    }
    assert forward.count(batch) == {"tokens": 3, "tokens/a": 2, "tokens/b": 1}
    counts = forward.count(batch)
    assert forward.count({"targets": batch["targets"]}) == {"tokens": 3, "tokens/a": 0, "tokens/b": 0}

    def end(ok: bool) -> None:
        zero = torch.zeros(())
        result = StepResult(
            loss=zero, objective=zero, grad_norm=zero, ok=torch.tensor(ok), tokens=4, counts=counts
        )
        losses.step_end(None, 1, result)  # type: ignore[arg-type]

    forward(torch.nn.Identity(), batch)
    end(True)
    bad = {**batch, "loss": torch.full((2, 2), float("nan"))}
    forward(torch.nn.Identity(), bad)
    end(False)
    with torch.no_grad():
        forward(torch.nn.Identity(), bad)
    read = {metric.name: metric.read() for metric in losses.metrics()}
    assert [t.item() for t in read["loss/a"]] == [4.0, 2.0]  # type: ignore[union-attr]
    assert [t.item() for t in read["loss/b"]] == [5.0, 1.0]  # type: ignore[union-attr]
    assert losses.totals == {"a": 4, "b": 2}
    again = {metric.name: metric.read() for metric in losses.metrics()}
    assert [t.item() for t in again["loss/a"]] == [0.0, 0.0]  # type: ignore[union-attr]
    extra = losses.extra()
    other = SourceLosses(["b", "c"], torch.device("cpu"))
    other.extra().load_state_dict(extra.state_dict())
    assert other.totals == {"b": 2, "c": 0}


def test_one_source_has_no_numbers_of_its_own() -> None:
    run = run_tiny(steps=2)
    assert not [name for name in run.records[0] if name.startswith(("loss/", "data/"))]


class Reads(TorchDispatchMode):
    """Counts reads of tensors by the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def test_counting_reads_nothing_from_the_device(tmp_path: Any) -> None:
    """A step that does not log makes no read; one that does makes one for all metrics together."""
    config = tiny_config(
        data={"mix": MIX, "holdout": 0.0},
        train={"max_steps": 8, "grad_accum_steps": 2},
        metrics={"log_interval": 4},
        run={"dir": str(tmp_path)},
        guard={"incidents": 0},
    )
    reads: list[int] = []
    with tiny_session(config) as session, Reads() as mode:
        session.run.create()
        session.metrics.start(0)

        def at_end(s: Any, step: int, result: Any) -> None:
            reads.append(mode.count)

        session.events["step_end"] = (*session.events["step_end"], at_end)
        run_training_loop(session)
        session.metrics.close()
    steps = [after - before for before, after in itertools.pairwise(reads)]
    # what is logged after step n is read before the end of step n + 1: steps 1, 4 and 8 log
    assert [steps[i] for i in (1, 2, 4, 5, 6)] == [0] * 5
