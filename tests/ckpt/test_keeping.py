"""Which checkpoints stay, with numbers worked out by hand, and how a keeper behaves when called by itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptkit import names

import forge_ckpt.plugin
from forge_ckpt import open_checkpoint
from forge_core.contract import Transform
from forge_core.testing import isolated_plugins, plugin_object, tiny_config, tiny_session


@contextmanager
def keeping(folder: Path, apply: Any = None, **table: Any) -> Iterator[tuple[Any, Any]]:
    """A session that has not trained, and its keeper, which has loaded what there is."""
    hooks: dict[str, Any] = {}
    if apply is not None:
        hooks["forge_model_transforms"] = lambda: [Transform(phase="adapt", name="test", apply=apply)]
    plugins = isolated_plugins({"checkpoint": forge_ckpt.plugin, "test": plugin_object(**hooks)})
    run = {"dir": str(folder), "name": "a"}
    config = tiny_config(plugins=plugins, checkpoint={"mode": "sync", **table}, run=run, test=True)
    with tiny_session(config, plugins) as session:
        keeper: Any = session.checkpointer
        session.step = keeper.load(session)
        yield session, keeper
        keeper.drain()
        keeper.close()


def save(session: Any, keeper: Any, *steps: int) -> None:
    for step in steps:
        session.step = step
        keeper.save(session, step, "scheduled")


def test_the_last_two_by_number_and_not_by_letter(tmp_path: Path) -> None:
    with keeping(tmp_path, keep_last=2) as (session, keeper):
        save(session, keeper, 900, 1000, 1100)
    assert names(tmp_path) == ["latest", "step_00001000", "step_00001100"]


def test_a_removal_that_is_cut_short_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start finishes it, and puts nothing back of which files are gone."""

    def cut_short(folder: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            next(folder.glob("*.safetensors")).unlink()
            raise OSError(5, "the disk went away")

    with keeping(tmp_path, keep_last=1) as (session, keeper):
        save(session, keeper, 10)
        with monkeypatch.context() as patch:
            patch.setattr("forge_ckpt.store.shutil.rmtree", cut_short)
            save(session, keeper, 20)
    assert list((tmp_path / "a/checkpoints").glob(".replaced*"))
    with keeping(tmp_path) as (session, _):
        assert session.step == 20
    assert names(tmp_path) == ["latest", "step_00000020"]


def test_a_higher_number_of_an_older_run_pushes_nothing_out(tmp_path: Path) -> None:
    with keeping(tmp_path) as (session, keeper):
        save(session, keeper, 5000)
    with keeping(tmp_path, keep_last=1, resume=False) as (session, keeper):
        save(session, keeper, 10, 20)
    assert "step_00000020" in names(tmp_path)
    assert (tmp_path / "a/checkpoints/latest").readlink() == Path("step_00000020")
    with keeping(tmp_path) as (session, _):
        assert session.step == 20


def test_torn_ones_do_not_count(tmp_path: Path) -> None:
    """Two complete ones and one without its manifest, of which two may stay: both complete ones do."""
    folder = tmp_path / "a/checkpoints"
    with keeping(tmp_path, keep_last=2) as (session, keeper):
        save(session, keeper, 10, 20)
        (folder / "step_00000030").mkdir()
        save(session, keeper, 40)
    assert names(tmp_path) == ["latest", "step_00000020", "step_00000030", "step_00000040"]


def test_a_narrower_type_is_told_with_the_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """1 + 2^-10 has more bits than bfloat16 keeps."""
    exact = 1.0009765625

    def narrow(model: Any) -> Any:
        model.norm.to(torch.bfloat16)
        return model

    with keeping(tmp_path) as (session, keeper):
        with torch.no_grad():
            session.model.norm.weight.fill_(exact)
        save(session, keeper, 1)
    with keeping(tmp_path) as (session, _):
        assert session.model.norm.weight.tolist() == [exact] * 16
    with (
        caplog.at_level(logging.WARNING, logger="forge"),
        keeping(tmp_path, apply=narrow, allow_changed=["optimizer"]) as (session, _),
    ):
        assert session.model.norm.weight.tolist() == [1.0] * 16
    assert "norm.weight was saved as torch.float32 and is torch.bfloat16 here" in caplog.text


def compiled(block: Any) -> Any:
    return torch.compile(block, backend="eager")


def recomputed(block: Any) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(block)


@pytest.mark.parametrize(
    "wrappers", [(compiled,), (recomputed,), (compiled, recomputed), (recomputed, compiled)]
)
def test_blocks_that_a_plugin_wrapped_have_their_plain_names(wrappers: Any, tmp_path: Path) -> None:
    """Here blocks are compiled and recomputed in place; a plugin may put them into modules of torch."""

    def wrap(model: Any) -> Any:
        for name, block in list(model.layers.items()):
            for each in wrappers:
                block = each(block)
            model.layers[name] = block
        return model

    def save_another(session: Any, keeper: Any) -> None:
        with torch.no_grad():
            for parameter in session.model.parameters():
                parameter.add_(1.0)
        save(session, keeper, 1)

    with keeping(tmp_path / "plain") as (session, keeper):
        save_another(session, keeper)
    plain = open_checkpoint(tmp_path / "plain/a")
    with keeping(tmp_path / "wrapped", apply=wrap) as (session, keeper):
        assert any("_orig_mod" in n or "_wrapped" in n for n, _ in session.model.named_parameters())
        save_another(session, keeper)
    wrapped = open_checkpoint(tmp_path / "wrapped/a")
    assert set(wrapped.index.tensors) == set(plain.index.tensors)
    for folder, apply, there in (("wrapped", None, wrapped), ("plain", wrap, plain)):
        with keeping(tmp_path / folder, apply=apply) as (session, _):
            assert session.step == 1
            for name, parameter in session.freeze.named.items():
                assert torch.equal(parameter, there.tensor(f"model/{name}")), name


def test_a_name_that_is_missing_is_told(tmp_path: Path) -> None:
    from forge_ckpt.errors import RefusedError
    from forge_ckpt.index import Index
    from forge_ckpt.restoring import load_model

    with keeping(tmp_path) as (session, keeper):
        save(session, keeper, 1)
        saved = open_checkpoint(tmp_path / "a")
        gone = "model/layers.1.attn.o_proj.weight"
        assert gone in saved.index.tensors
        saved._index = Index({n: t for n, t in saved.index.tensors.items() if n != gone})
        with pytest.raises(
            RefusedError, match=r"the model has layers\.1\.attn\.o_proj\.weight, which .* lacks"
        ):
            load_model(session, saved)
