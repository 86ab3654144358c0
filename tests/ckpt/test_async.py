"""What is saved in the background is one moment, whatever happens meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import forge_ckpt.plugin
import forge_ckpt.store
from forge_ckpt import open_checkpoint
from forge_core.loop.update import skip_update
from forge_core.testing import isolated_plugins, tiny_config, tiny_session


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_is_a_snapshot(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is 1.0 at step 3; as soon as `staged` returns it is overwritten by 2.0 and the counters
    move.
    """
    real = forge_ckpt.store.write_file

    def slow(path: Path, parts: Any) -> Any:
        time.sleep(1.0 if "weights" in path.name else 0.0)
        return real(path, parts)

    monkeypatch.setattr(forge_ckpt.store, "write_file", slow)
    plugins = isolated_plugins({"checkpoint": forge_ckpt.plugin})
    table = {"mode": mode}
    run = {"dir": str(tmp_path), "name": "a"}
    model = {"dim": 1000, "n_heads": 10, "n_layers": 1, "ffn_hidden_dim": 64, "vocab_size": 1000}
    config = tiny_config(plugins=plugins, checkpoint=table, run=run, model=model)
    with tiny_session(config, plugins) as session:
        keeper: Any = session.checkpointer
        assert keeper.load(session) == 0
        fill(session, 1.0)
        session.step, session.tokens_seen = 3, 300
        session.stream.take(3)
        position = session.stream.state_dict()
        keeper.save(session, 3, "scheduled")
        keeper.staged()
        fill(session, 2.0)
        session.step, session.tokens_seen = 6, 600
        following = session.stream.take(1)
        torch.rand(3)
        keeper.drain()
        keeper.close()
    with tiny_session(config, plugins) as session:
        assert session.checkpointer.load(session) == 3
        assert torch.equal(session.stream.take(1)[0]["tokens"], following[0]["tokens"])
        session.checkpointer.close()
    saved = open_checkpoint(tmp_path / "a")
    assert saved.verify() == []
    assert saved.manifest.step == saved.state()["step"] == 3
    assert saved.state()["tokens_seen"] == 300
    assert saved.state()["data"] == position
    for name in saved.index.tensors:
        assert bool((saved.tensor(name) == 1.0).all()), name


def fill(session: Any, value: float) -> None:
    optimizer = session.optimizers["main"].optimizer
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.fill_(value)
            for state in optimizer.state[parameter].values():
                state.fill_(value)


def test_copying_goes_on_beside_the_training_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save` returns while the copy is held up; only `staged` waits for it."""
    from forge_ckpt.staging import Copier

    gate, real = threading.Event(), Copier.copy

    def copy(self: Any, places: Any, sources: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(20)
        real(self, places, sources)

    monkeypatch.setattr(Copier, "copy", copy)
    plugins = isolated_plugins({"checkpoint": forge_ckpt.plugin})
    config = tiny_config(plugins=plugins, checkpoint=True, run={"dir": str(tmp_path), "name": "a"})
    with tiny_session(config, plugins) as session:
        keeper: Any = session.checkpointer
        keeper.load(session)
        keeper.save(session, 1, "scheduled")
        waited = threading.Thread(target=keeper.staged)
        waited.start()
        waited.join(0.2)
        assert waited.is_alive()
        gate.set()
        waited.join(20)
        assert not waited.is_alive()
        keeper.drain()
        keeper.close()
        saved = open_checkpoint(tmp_path / "a")  # nor was anything written before it was copied
        for name, parameter in session.freeze.named.items():
            assert torch.equal(saved.tensor(f"model/{name}"), parameter.detach()), name


def test_a_step_that_has_nothing_to_learn_from_waits_for_the_copy_too(tmp_path: Path) -> None:
    """A plugin's functions run after it, as after any update, and may change parameters."""
    plugins = isolated_plugins({"checkpoint": forge_ckpt.plugin})
    config = tiny_config(plugins=plugins, checkpoint=True, run={"dir": str(tmp_path), "name": "a"})
    with tiny_session(config, plugins) as session:
        keeper: Any = session.checkpointer
        keeper.load(session)
        fill(session, 1.0)
        copied, real = [], keeper.saver.copier.copy

        def late(places: Any, sources: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.3)
            real(places, sources)
            copied.append(len(places))

        keeper.saver.copier.copy = late
        keeper.save(session, 1, "scheduled")
        copied.clear()
        skip_update(session, torch.zeros(()))
        assert copied
        fill(session, 2.0)
        keeper.drain()
        keeper.close()
    saved = open_checkpoint(tmp_path / "a")
    assert all(bool((saved.tensor(f"model/{name}") == 1.0).all()) for name in saved.index.names("model/"))


def test_the_copying_thread_leaves_cores_alone() -> None:
    from forge_ckpt.staging import Copier

    before = torch.get_num_threads()
    copier = Copier(torch.device("cpu"))
    inside = copier._pool().submit(torch.get_num_threads).result()
    copier.close()
    assert inside == 1
    assert torch.get_num_threads() == before
