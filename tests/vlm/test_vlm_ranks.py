"""Models that see on several ranks: losses, norms and weights are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vlmkit import Tables, mixed_records, write_samples
from vlmruns import FUSIONS, MOE, collectives_of_a_step, of, run, same, trainable

from forge_core.plugins import Plugins
from forge_core.testing import tiny_config
from forge_core.testing.pool import WorkerPool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many samples without an image, so that ranks and micro-batches differ in what they see."""
    return write_samples(tmp_path_factory.mktemp("samples"), mixed_records(40))


CHOICE: dict[str, Any] = {**MOE, "router": "expert_choice", "expert_choice": {"auxiliary": True}}


@pytest.mark.packages("moe", "vlm")
def test_experts_that_choose_are_divided_over_ranks(pool2: WorkerPool, folder: Path) -> None:
    """Those of each modality choose among the tokens of their rank: with two ranks either way."""
    more = {**trainable("moma"), "moe": CHOICE}
    expected = pool2.run(run, of(folder, 2, **more))[0]
    for found in pool2.run(run, of(folder, 2, **{**more, "moe": {**CHOICE, "ep": 2}})):
        same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"tp": 2}])
def test_copies_of_the_weights_for_text_on_ranks(
    pool2: WorkerPool, folder: Path, layout: dict[str, int]
) -> None:
    more = trainable("mot")
    more["vlm"]["mot"] = {"copy_text": True}
    expected = run(of(folder, **more))
    ranks = 1 if layout else 2
    for found in pool2.run(run, of(folder, ranks, **more, distributed=layout)):
        same(found, expected)


@pytest.mark.slow
def test_norms_of_each_modality_on_tensor_ranks(pool2: WorkerPool, folder: Path) -> None:
    """Before and behind both parts of a block, and over all heads together."""
    more = trainable("mot")
    more["model"] = {"qk_norm": True, "qk_norm_over": "all_heads", "block_norm": "sandwich", "dropout": 0.1}
    expected = run(of(folder, **more))
    for found in pool2.run(run, of(folder, **more, distributed={"tp": 2})):
        same(found, expected)


def test_a_rank_without_any_image_waits_for_nobody(pool2: WorkerPool, tmp_path: Path) -> None:
    """One sample in twenty has an image: most micro-batches see none, on one rank or on both."""
    records = [{"answer": f"b{n}", **({"image": "0.png"} if n % 20 == 0 else {})} for n in range(40)]
    write_samples(tmp_path, records)
    expected = run(of(tmp_path, **trainable("joint")))
    for found in pool2.run(run, of(tmp_path, 2, 2, **trainable("joint"))):
        same(found, expected)


def test_gradients_are_reduced_once_a_step(pool2: WorkerPool, folder: Path) -> None:
    """However many micro-batches there are: two of a trained encoder and three of the rest; the counts of the
    step, and the norm with its losses."""
    for accumulate in (1, 2):
        more = of(folder, 2, accumulate, **trainable("joint"), metrics={"log_interval": 100})
        more["eval"] = {"at_end": False}
        for found in pool2.run(collectives_of_a_step, more):
            assert (found["reduce_scatter_base"], found["allreduce"]) == (2 + 3, 2)
            assert set(found) == {"reduce_scatter_base", "allreduce", "allgather_base"}


def test_a_frozen_encoder_with_statistics_keeps_every_bit(pool2: WorkerPool, folder: Path) -> None:
    vlm = {"encoder": {"name": "mine/normed", "mine/normed": {"image_size": 8, "patch_size": 4, "dim": 16}}}
    more: Tables = {"vlm": vlm, "mine": {}, "optimizer": {"weight_decay": 0.1}, "eval": {"interval": 2}}
    start = run(of(folder, train={"max_steps": 1}, **more), True)
    for found in pool2.run(run, of(folder, 2, **more), True):
        for name, value in start["weights"].items():
            if name.startswith("encoder."):
                assert torch.equal(found["weights"][name], value), name
        assert all(torch.equal(found["buffers"][name], value) for name, value in start["buffers"].items())
        assert float(found["buffers"]["norm.num_batches_tracked"]) == 0
        assert not found["modes"]
        assert found["state"] == found["graded"] == 0
        moved = found["weights"]["connector.up_proj.weight"] - start["weights"]["connector.up_proj.weight"]
        assert moved.abs().max() > 0


def test_an_encoder_unfrozen_later_is_equal_on_all_ranks(pool2: WorkerPool, folder: Path) -> None:
    more: Tables = {"freeze": {"stages": [{"start_step": 3, "modules": []}]}}
    expected = run(of(folder, **more))
    first, second = pool2.run(run, of(folder, 2, **more))
    same(first, expected)
    name = "encoder.patches.weight"
    assert torch.equal(first["weights"][name], second["weights"][name])


OTHERS = [
    pytest.param(name, marks=[pytest.mark.slow, pytest.mark.packages("moe", "vlm")])
    for name in FUSIONS
    if name != "joint"
]


@pytest.mark.parametrize("fusion", ["joint", *OTHERS])
def test_text_alone_mixes_with_images(pool2: WorkerPool, folder: Path, tmp_path: Path, fusion: str) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox " * 60, encoding="utf-8")
    mix = [
        {"name": "seen", "source": "vlm/images", "path": str(folder), "weight": 1.0},
        {"name": "read", "source": "text", "path": str(tmp_path), "weight": 2.0},
    ]
    found = of(folder, **trainable(fusion))
    two = of(folder, 2, **trainable(fusion))
    for each in (found, two):
        each["data"] = {"tokenizer": "bytes", "holdout": 0.3, "mix": mix}
        each["model"]["vocab_size"] = 257
        each["eval"] = {"steps": 1, "interval": 3, "batch_size": 2}
    expected = run(found)
    assert any(expected["images"])
    for each in pool2.run(run, two):
        same(each, expected)


PACKED: Tables = {"data": {"vlm/images": {"pack": True}}}


@pytest.mark.packages("moe", "vlm")
@pytest.mark.parametrize("fusion", FUSIONS)
def test_packed_samples_have_the_loss_that_they_have_alone(folder: Path, fusion: str) -> None:
    """The first step's loss over all samples: one update takes all rows."""
    from forge_core.testing import tiny_session

    sums = []
    for more in ({}, PACKED):
        plugins = Plugins()
        found = of(folder, **trainable(fusion), **more)
        found["vlm"]["max_images"] = 4
        found["train"]["seq_len"] = 64
        with tiny_session(tiny_config(plugins=plugins, **found), plugins) as session:
            session.model.eval()
            total, count = 0.0, 0
            source: Any = session.data.train.sources[0]  # type: ignore[attr-defined]
            for number in range(len(source)):
                row = {name: torch.as_tensor(value)[None] for name, value in source[number].items()}
                with torch.no_grad():
                    total += float(session.forward(session.model, row).token_loss.sum())
                count += session.forward.count(row)["tokens"]
            sums.append((total, count, len(source)))
    assert sums[1][2] < sums[0][2]
    assert sums[0][1] == sums[1][1]
    assert sums[0][0] == pytest.approx(sums[1][0], rel=1e-9)
