"""Encoders that train on several ranks: losses and weights are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vlmkit import TOWER, Tables, config_of, mixed_records, tables, write_samples
from vlmruns import of, run, same

from forge_core.plugins import Plugins
from forge_core.testing import run_tiny, tiny_config, tiny_session
from forge_core.testing.pool import WorkerPool

FULL: dict[str, Any] = {"activation_checkpointing": "full"}


@pytest.mark.parametrize("name", ["clip", "idefics3"])
def test_a_tower_trains_on_two_ranks_as_on_one(pool2: WorkerPool, tmp_path: Path, name: str) -> None:
    """CLIP's last block and last norm, behind the states that are taken, move by decay alone, if at all."""
    pytest.importorskip("transformers")
    write_samples(tmp_path, mixed_records(40))
    encoder = {"name": name, name: TOWER, "frozen": False}
    more: dict[str, Any] = {"vlm": {"encoder": encoder}}
    expected = run(of(tmp_path, **more))
    for found in pool2.run(run, of(tmp_path, 2, **more)):
        same(found, expected)


def test_half_precision_on_two_ranks_is_that_of_one(pool2: WorkerPool, tmp_path: Path) -> None:
    """Norms of torch, in blocks that gather their weights; blocks that never run, while gradients add up."""
    pytest.importorskip("transformers")
    write_samples(tmp_path, mixed_records(40))
    encoder = {"name": "clip", "clip": TOWER, "frozen": False}
    more: dict[str, Any] = {"vlm": {"encoder": encoder}, "train": {"dtype": "bf16", **FULL}}
    expected = run(of(tmp_path, **more))
    for found in pool2.run(run, of(tmp_path, 2, 2, **more)):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-2)


@pytest.mark.parametrize(("frozen", "times"), [(False, 2), (True, 1)])
def test_blocks_of_an_encoder_that_trains_are_computed_again(
    tmp_path: Path, frozen: bool, times: int
) -> None:
    write_samples(tmp_path, mixed_records(8))
    plugins, calls = Plugins(), []
    more: dict[str, Any] = {"vlm": {"encoder": {"frozen": frozen}}, "train": FULL}
    with tiny_session(config_of(tmp_path, plugins, **more), plugins) as session:
        session.freeze.apply(1)
        model: Any = session.model
        model.encoder.blocks[0].attn_norm.register_forward_hook(lambda *_: calls.append(1))
        session.step_fn.train(session, 1)
    assert len(calls) == times


def of_text(found: Tables) -> list[float]:
    """Losses of a run."""
    plugins = Plugins()
    return run_tiny(tiny_config(plugins=plugins, **found), plugins).losses


def test_an_encoder_that_nothing_asks_stands_beside_text_in_half_precision(
    pool2: WorkerPool, tmp_path: Path
) -> None:
    """It trains and never runs, while gradients add up in another dtype than they are reduced in."""
    (tmp_path / "a.txt").write_text("some words that are read twice\n" * 60)
    encoder = {"frozen": False}
    data = {"source": "text", "path": str(tmp_path / "a.txt")}

    def of_ranks(ranks: int) -> Tables:
        train = {"dtype": "bf16", "batch_size": 2 // ranks, "grad_accum_steps": 2}
        return tables(tmp_path, data=data, train=train, vlm={"encoder": encoder})

    expected = of_text(of_ranks(1))
    for found in pool2.run(of_text, of_ranks(2)):
        assert found == pytest.approx(expected, rel=1e-3)
