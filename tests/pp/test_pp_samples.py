"""One rank of a pipeline reads each sample once an epoch, as one process does; the others ask for none."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ppkit import ASKED, extra_terms

import forge_pp.plugin
from forge_core.contract import Component, Observer
from forge_core.data.source import SourceSpec
from forge_core.testing import (
    WorkerPool,
    isolated_plugins,
    plugin_object,
    run_tiny,
    tiny_config,
    tiny_session,
)
from forge_pp.feed import cpu_group
from forge_pp.outbox import Outbox

LENGTH = 8


class Numbered:
    """20 samples of two documents each; every token of sample i is i. Remembers what it is asked for."""

    fingerprint = "numbered"

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        ASKED.append(index)
        row = np.full(LENGTH, index)
        documents = np.repeat(np.arange(2, dtype=np.int32), LENGTH // 2)
        return {"tokens": row, "targets": row, "documents": documents}


def numbered(spec: SourceSpec, options: object) -> Numbered:
    return Numbered()


class Contents(Observer):
    """Which contents of its micro-batches this rank gets."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def train_begin(self, session: Any) -> None:
        forward = getattr(session.forward, "inner", session.forward)
        part = forward.part

        def noted(model: Any, batch: Any, *rest: Any, **named: Any) -> Any:
            self.names |= {name for name, value in batch.items() if not value.is_meta}
            return part(model, batch, *rest, **named)

        forward.part = noted


def read(tables: dict[str, Any]) -> dict[str, Any]:
    """Three epochs, of micro-batches of one, and an evaluation of one batch."""
    contents = Contents()
    kit = plugin_object(
        forge_components=[Component(category="data_source", name="n", target="test_pp_samples:numbered")],
        forge_observers=lambda: [contents],
    )
    plugins = isolated_plugins({"pp": forge_pp.plugin, "kit": kit, "terms": extra_terms()})
    train = {"batch_size": 1, "grad_accum_steps": 4, "max_steps": 15, "seq_len": LENGTH, "dtype": "fp64"}
    config = tiny_config(
        plugins=plugins,
        kit=True,
        train=train,
        model={"vocab_size": 32, "n_layers": 4},
        **{"data": {"source": "kit/n", "holdout": 0.0}, "eval": {"at_end": False}, **tables},
    )
    ASKED.clear()
    run = run_tiny(config, plugins)
    position = run.session.stream.position
    return {
        "asked": list(ASKED),
        "losses": run.losses,
        "evaluations": run.metric("eval/loss"),
        "position": position,
        "contents": sorted(contents.names),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_the_first_rank_reads_for_all(size: int, pool2: WorkerPool, pool4: WorkerPool) -> None:
    whole = read({})
    first, *others = (pool2 if size == 2 else pool4).run(read, {"pp": {"size": size}})
    assert first["asked"] == whole["asked"]
    for start in (0, 20, 40):
        assert sorted(first["asked"][start : start + 20]) == list(range(20))
    for rank in (first, *others):
        assert rank["losses"] == pytest.approx(whole["losses"], rel=1e-10)
        assert rank["position"] == whole["position"] == 60
    for rank in others:
        assert rank["asked"] == []
    # what stages between read is where documents begin; the last compares with targets
    assert [rank["contents"] for rank in others[:-1]] == [["documents", "sources"]] * (size - 2)
    assert others[-1]["contents"] == ["documents", "sources", "targets"]


def test_both_ends_on_one_rank(pool2: WorkerPool) -> None:
    """The first rank then has all that is read; the stages of the other stand between."""
    whole = read({})
    first, second = pool2.run(read, {"pp": {"size": 2, "schedule": "zbv"}})
    assert first["asked"] == whole["asked"]
    assert second["asked"] == []
    assert second["contents"] == ["documents", "sources"]
    assert second["losses"] == pytest.approx(whole["losses"], rel=1e-10)


def test_an_evaluation_is_read_once(pool2: WorkerPool) -> None:
    held = {"eval": {"at_end": True, "interval": 5, "steps": 3}, "data": {"source": "kit/n", "holdout": 0.25}}
    whole = read(held)
    first, second = pool2.run(read, {**held, "pp": {"size": 2}})
    assert second["asked"] == []
    assert first["asked"] == whole["asked"]
    assert first["evaluations"] == pytest.approx(whole["evaluations"], rel=1e-10)


def test_terms_of_the_objective_may_look_at_a_whole_batch(pool2: WorkerPool) -> None:
    for rank in pool2.run(read, {"pp": {"size": 2}, "terms": {}}):
        assert rank["contents"] == ["documents", "sources", "targets", "tokens"]


def cpu_ranks() -> list[Any]:
    """The ranks that hand each other samples on the CPU, where stages are on an accelerator."""
    tables: Any = {"pp": {"size": 2}, "distributed": {"dp_shard": 2}, "train": {"grad_accum_steps": 2}}
    plugins = isolated_plugins({"pp": forge_pp.plugin})
    with tiny_session(tiny_config(plugins=plugins, **tables), plugins) as session:
        stages: Any = SimpleNamespace(group=session.mesh.group("pp"))
        accelerated: Any = SimpleNamespace(device=torch.device("cuda"), mesh=session.mesh)
        group = cpu_group(accelerated, stages)
        number = torch.tensor([torch.distributed.get_rank()])
        torch.distributed.all_reduce(number, group=group)
        both = [torch.distributed.get_process_group_ranks(g) for g in (group, stages.group)]
        return [*both, int(number)]


def test_samples_travel_on_the_cpu(pool4: WorkerPool) -> None:
    for rank, (found, stages, total) in enumerate(pool4.run(cpu_ranks)):
        assert found == stages == [rank % 2, rank % 2 + 2]
        assert total == sum(found)


def kept(steps: int, batches: int) -> dict[str, Any]:
    """What a rank has sent and still holds after each update, and during an evaluation; looks for a stop."""
    sent: list[Any] = []
    held: dict[str, list[int]] = {"update": [], "batch": []}
    asked: list[None] = []
    send = Outbox.send

    def noted(outbox: Outbox, tensor: torch.Tensor, rank: int) -> None:
        sent.append(weakref.ref(tensor))
        send(outbox, tensor, rank)

    def holds() -> int:
        return sum(tensor() is not None for tensor in sent)

    train = {"batch_size": 1, "grad_accum_steps": 2, "seq_len": LENGTH}
    plugins = isolated_plugins({"pp": forge_pp.plugin})
    config = tiny_config(plugins=plugins, pp={"size": 2}, train=train, model={"n_layers": 2})
    with tiny_session(config, plugins) as session, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outbox, "send", noted)
        pipeline: Any = session.forward.step  # type: ignore[attr-defined]
        batch = session.stream.take(1)[0]
        for step in range(1, steps + 1):
            session.step_fn.train(session, step)
            held["update"].append(holds())
        alone, check = pipeline.forward_alone, session.check_stop

        def forward(*given: Any) -> Any:
            held["batch"].append(holds())
            return alone(*given)

        patch.setattr(pipeline, "forward_alone", forward)
        patch.setattr(type(session), "check_stop", lambda self: [asked.append(None), check()][1])
        pipeline.evaluate(session, [batch] * batches)
    return {**held, "asked": len(asked)}


def test_what_was_sent_is_let_go_of(pool2: WorkerPool) -> None:
    first, second = pool2.run(kept, 6, 32)
    assert max(first["update"]) == first["update"][0] > 0, "one update's, however many there were"
    assert max(first["batch"]) <= 3 * 4 + 3 * 2, "three tensors a batch for the other, two batches ahead"
    assert second["update"] == [0] * 6
    # a look for a stop is where all ranks wait for each other: between two of them batches overlap
    assert first["asked"] == second["asked"] == 32 // 8
