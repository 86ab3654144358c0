"""A checkpoint of any number of stages and any schedule is one of any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.testing import WorkerPool

pytestmark = pytest.mark.packages("ckpt", "pp")

CHECKPOINT = {"interval": 2, "mode": "sync", "keep_last": 0}


def go(folder: str, tables: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train to `steps` in a named run: losses, state before the first update, weights at the end."""
    from ppkit import BASE, merged, plain_descent
    from rankskit import AtBegin, whole

    import forge_ckpt.plugin
    import forge_pp.plugin
    from forge_core.testing import isolated_plugins, plugin_object, run_tiny, tiny_config

    begin = AtBegin()
    plugins = isolated_plugins(
        {
            "checkpoint": forge_ckpt.plugin,
            "pp": forge_pp.plugin,
            "plain": plain_descent(),
            "test": plugin_object(forge_observers=lambda: [begin]),
        }
    )
    named = {"run": {"name": "a"}, "checkpoint": CHECKPOINT, "test": True, "scheduler": {"name": "constant"}}
    both = merged(BASE, {"model": {"n_layers": 8}}, named, tables, {"train": {"max_steps": steps}})
    run = run_tiny(tiny_config(plugins=plugins, **both), plugins, folder=folder)
    weights = {name: whole(p) for name, p in run.session.freeze.named.items()}
    return {"losses": run.losses, "step": begin.step, "begin": begin.values, "weights": weights}


def together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """All that ranks hold, one copy of each."""
    found: dict[str, Any] = {}
    for rank in ranks:
        for name, value in rank["begin"].items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_saved_by_two_stages_loaded_by_one_and_by_four(
    tied: bool, pool2: WorkerPool, pool4: WorkerPool, tmp_path: Path
) -> None:
    model = {"model": {"tie_embeddings": tied}}
    for name in ("one", "two", "four"):
        pool2.run(go, str(tmp_path / name), {**model, "pp": {"size": 2, "schedule": "1f1b"}}, 4)
    on_two = pool2.run(go, str(tmp_path / "two"), {**model, "pp": {"size": 2, "schedule": "1f1b"}}, 6)
    on_one = go(str(tmp_path / "one"), model, 6)
    on_four = pool4.run(go, str(tmp_path / "four"), {**model, "pp": {"size": 4, "schedule": "zbv"}}, 6)
    assert {run["step"] for run in (on_one, *on_two, *on_four)} == {4}
    saved = together(on_two)
    for loaded in (on_one["begin"], together(on_four)):
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(value, saved[name]) for name, value in loaded.items())
    for run in (*on_two, *on_four):  # and they go on alike
        assert run["losses"] == pytest.approx(on_one["losses"], rel=1e-10)
        for name, value in run["weights"].items():
            torch.testing.assert_close(value, on_one["weights"][name], rtol=1e-10, atol=1e-10)


def test_saved_whole_loaded_by_stages_of_sharded_weights(pool4: WorkerPool, tmp_path: Path) -> None:
    pp = {"pp": {"size": 2, "schedule": "interleaved_1f1b"}, "distributed": {"dp_shard": 2}}
    go(str(tmp_path), {}, 4)
    whole = go(str(tmp_path), {}, 5)
    assert whole["step"] == 4
    (tmp_path / "b").mkdir()
    go(str(tmp_path / "b"), {}, 4)
    ranks = pool4.run(go, str(tmp_path / "b"), {**pp, "train": {"grad_accum_steps": 2}}, 5)
    loaded = together(ranks)
    assert loaded.keys() == whole["begin"].keys()
    assert all(torch.equal(value, whole["begin"][name]) for name, value in loaded.items())


@pytest.mark.parametrize(("schedule", "dtype"), [("1f1b", "fp64"), ("zbv", "bf16")])
def test_resumed_stages_draw_the_noise_of_a_straight_run(
    schedule: str, dtype: str, pool2: WorkerPool, tmp_path: Path
) -> None:
    """Bit for bit: weights, moments, position and the random state of every stage."""
    tables = {
        "pp": {"size": 2, "schedule": schedule},
        "model": {"dropout": 0.2},
        "train": {"dtype": dtype},
    }
    for name in ("straight", "resumed"):
        (tmp_path / name).mkdir()
    straight = pool2.run(go, str(tmp_path / "straight"), tables, 6)
    pool2.run(go, str(tmp_path / "resumed"), tables, 4)
    resumed = pool2.run(go, str(tmp_path / "resumed"), tables, 6)
    for whole, rank in zip(straight, resumed, strict=True):
        assert rank["step"] == 4
        assert rank["losses"] == whole["losses"][4:]
        assert rank["weights"].keys() == whole["weights"].keys()
        assert all(torch.equal(value, whole["weights"][name]) for name, value in rank["weights"].items())


SMALL = {"vocab_size": 11, "dim": 4, "ffn_hidden_dim": 8, "n_layers": 2, "tie_embeddings": True}


def test_a_tied_embedding_is_saved_once(pool2: WorkerPool, tmp_path: Path) -> None:
    """Two stages, vocabulary 11, width 4, plain descent: saved after two updates, gone on with by one
    process."""
    tables: dict[str, Any] = {
        "model": SMALL,
        "optimizer": {"name": "plain/sgd", "lr": 0.1},
        "plain": {},
        "train": {"dtype": "fp32"},
    }
    for name in ("straight", "stages"):
        (tmp_path / name).mkdir()
    whole = go(str(tmp_path / "straight"), tables, 3)
    pool2.run(go, str(tmp_path / "stages"), {**tables, "pp": {"size": 2}}, 2)
    found = go(str(tmp_path / "stages"), tables, 3)
    assert found["step"] == 2
    assert found["losses"] == pytest.approx(whole["losses"][2:], rel=1e-6)
    for name, value in whole["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-6, atol=1e-6)


def trained(folder: str, tables: dict[str, Any]) -> dict[str, Any]:
    """Train on bytes of text in a named run of installed plugins: weights at the end."""
    import forge_ckpt.plugin
    import forge_pp.plugin
    from forge_core.testing import isolated_plugins, run_tiny, tiny_config

    plugins = isolated_plugins({"checkpoint": forge_ckpt.plugin, "pp": forge_pp.plugin})
    run = run_tiny(tiny_config(plugins=plugins, **tables), plugins, folder=folder)
    return {name: p.detach().clone() for name, p in run.session.freeze.named.items()}


@pytest.mark.parametrize("tied", [False, True])
def test_exported_from_stages(
    tied: bool, pool2: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from forge_ckpt.hf.opening import open_model
    from forge_ckpt.hf.using import using
    from forge_core.commands.main import main

    text = tmp_path / "text"
    text.mkdir()
    for i in range(8):
        (text / f"{i}.txt").write_text(f"The number is {i}. " * 40)
    tables: dict[str, Any] = {
        "run": {"name": "a"},
        "model": {"n_layers": 4, "vocab_size": 257, "max_seq_len": 48, "tie_embeddings": tied},
        "train": {"grad_accum_steps": 4, "max_steps": 2},
        "data": {"source": "text", "tokenizer": "bytes", "path": str(text)},
        "checkpoint": CHECKPOINT,
        "pp": {"size": 2, "schedule": "interleaved_1f1b"},
    }
    weights: dict[str, Any] = {}
    for rank in pool2.run(trained, str(tmp_path), tables):
        weights |= rank
    assert main(["export", str(tmp_path / "a"), "--out", str(tmp_path / "hf")]) == 0
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "ours")]) == 0
    for folder in ("a", "hf", "ours"):
        with using(open_model(tmp_path / folder)) as session:
            named = session.freeze.named
            assert named.keys() == weights.keys()
            assert all(torch.equal(named[name], value) for name, value in weights.items())
    capsys.readouterr()
    words = ["--prompt", "The number", "--max-new-tokens", "4", "--temperature", "0"]
    assert main(["generate", str(tmp_path / "a"), *words]) == 0
