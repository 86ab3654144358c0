"""What cannot run is refused before any process waits, in words and with the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ppkit import BASE, merged, plugins_of
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from forge_core.errors import ConfigError
from forge_core.testing import WorkerPool, tiny_config
from forge_pp.schedules import SCHEDULES


def refused(world_size: int = 2, **tables: Any) -> str:
    both = merged(BASE, tables)
    with pytest.raises(ConfigError) as caught:
        tiny_config(plugins=plugins_of(both), world_size=world_size, **both)
    return str(caught.value)


def accepted(world_size: int = 2, **tables: Any) -> None:
    both = merged(BASE, tables)
    tiny_config(plugins=plugins_of(both), world_size=world_size, **both)


def test_fewer_micro_batches_than_stages() -> None:
    found = refused(pp={"size": 2}, train={"grad_accum_steps": 1})
    assert "at least as many micro-batches as stages" in found
    assert "1 for 2" in found
    assert "3 for 4" in refused(pp={"size": 2, "schedule": "dualpipev"}, train={"grad_accum_steps": 3})


def test_schedules_that_can_do_with_fewer_are_not_refused() -> None:
    accepted(pp={"size": 2, "schedule": "gpipe"}, train={"grad_accum_steps": 1})
    accepted(pp={"size": 2, "schedule": "looped_bfs"}, train={"grad_accum_steps": 1})
    accepted(pp={"size": 2, "schedule": "zbv"}, train={"grad_accum_steps": 3})


def test_rounds_that_do_not_divide() -> None:
    found = refused(pp={"size": 2, "schedule": "interleaved_1f1b"}, train={"grad_accum_steps": 5})
    assert "5 micro-batches over 2 ranks in 2 rounds" in found


def test_a_batch_that_does_not_divide() -> None:
    assert "7 is not a multiple of batch_size = 2" in refused(pp={"size": 2}, train={"global_batch_size": 7})


def test_more_stages_than_layers() -> None:
    found = refused(pp={"size": 2, "schedule": "looped_bfs", "stages_per_rank": 3})
    assert "6 stages are more than model.n_layers = 4" in found


def test_a_schedule_that_does_not_exist() -> None:
    assert "did you mean '1f1b'?" in refused(pp={"size": 2, "schedule": "1fb1"})
    assert ".csv" in refused(pp={"size": 2, "schedule": "wave"})


def test_stages_of_a_rank_that_a_schedule_cannot_have() -> None:
    assert "1f1b has 1 stage a rank, not 2" in refused(pp={"size": 2, "stages_per_rank": 2})
    assert "zbv has 2 stages a rank" in refused(pp={"size": 2, "schedule": "zbv", "stages_per_rank": 1})


def test_names_that_begin_stages() -> None:
    assert "names where 3 stages begin, and there are 2" in refused(pp={"size": 2, "split": ["1", "2"]})


def test_ranks_that_do_not_multiply() -> None:
    assert "pp 2" in refused(world_size=3, pp={"size": 2}, distributed={"dp_shard": 1})


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    assert "there is no file" in refused(pp={"size": 2, "schedule": str(path)})
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1X1\n")
    assert "'1X1' is no action" in refused(
        pp={"size": 2, "schedule": str(path)}, train={"grad_accum_steps": 2}
    )
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n")
    found = refused(pp={"size": 2, "schedule": str(path)}, train={"grad_accum_steps": 2})
    assert "stage 1 does not run micro-batch 1 forward and backward once" in found
    path.write_bytes(b"\xff\xfe0F0")
    assert f"{path} cannot be read" in refused(pp={"size": 2, "schedule": str(path)})


def test_a_file_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n")
    accepted(pp={"size": 2, "schedule": "~/mine.csv"}, train={"grad_accum_steps": 2})


def test_files_whose_ranks_would_wait_for_each_other_for_ever(tmp_path: Path) -> None:
    """Rank 0 hands out micro-batch 1 after the backward of 0, which rank 1 runs after that of 1."""
    path, tables = tmp_path / "mine.csv", {"train": {"grad_accum_steps": 2}}
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    assert "its ranks wait for each other" in refused(pp={"size": 2, "schedule": str(path)}, **tables)
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n")
    accepted(pp={"size": 2, "schedule": str(path)}, **tables)


def test_every_schedule_is_accepted_where_it_can_run() -> None:
    for schedule in SCHEDULES:
        accepted(pp={"size": 2, "schedule": schedule})


def test_torch_recomputes_selectively_only_once() -> None:
    """Why backwards in halves and selective recomputation are refused together."""
    assert "recomputes selectively only once" in refused(
        pp={"size": 2, "schedule": "zbv"}, train={"activation_checkpointing": "selective"}
    )

    def policy(*args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    x = torch.ones(2, 2, requires_grad=True)
    y = checkpoint(
        lambda t: (t @ t).sin(),
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    ).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="only allowed to backward once"):
        torch.autograd.grad(y, x)


def test_a_tied_embedding_of_two_stages_on_one_rank_is_not_sharded() -> None:
    accepted(pp={"size": 2, "schedule": "zbv"}, model={"tie_embeddings": True})
    accepted(world_size=4, pp={"size": 2, "schedule": "1f1b"}, model={"tie_embeddings": True})
    found = refused(world_size=4, pp={"size": 2, "schedule": "zbv"}, model={"tie_embeddings": True})
    assert "FSDP2 cannot shard a parameter that two stages share" in found


def shared_by_two() -> str:
    """What torch says of one sharded module in two models that run apart."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shared = torch.nn.Linear(4, 4)
    first, second = (torch.nn.Sequential(shared, torch.nn.Linear(4, 4)) for _ in range(2))
    fully_shard(shared, mesh=mesh)
    for model in (first, second):
        fully_shard(model, mesh=mesh)
    try:
        for model in (first, second):
            model(torch.ones(2, 4))
    except RuntimeError as error:
        return str(error)
    return ""


def test_torch_cannot_shard_what_two_models_share(pool2: WorkerPool) -> None:
    assert all("already been lazily initialized" in text for text in pool2.run(shared_by_two))
