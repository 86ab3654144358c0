"""Checkpoints with a part of a model, modules that are exported as others, architectures of strangers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_ckpt import plugin as checkpoint_plugin
from forge_ckpt.errors import RequestError
from forge_ckpt.hf.architectures import choose
from forge_ckpt.hf.exporting import export_hf
from forge_ckpt.hf.folders import TensorFolder
from forge_ckpt.hf.opening import open_model
from forge_ckpt.hf.using import using
from forge_core.config import Config
from forge_core.contract import Alias, Architecture, Transform
from forge_core.model import mark
from forge_core.plugins import Plugins
from forge_core.testing import TinyRun, isolated_plugins, plugin_object, run_tiny, tiny_config

TRAINED = ("layers.*.attn.q_proj.shift",)


class Shifted(nn.Linear):
    """weight + shift, of which the shift alone trains."""

    shift: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight + self.shift)

    def forge_export(self) -> dict[str, Tensor]:
        return {"weight": self.weight + self.shift}


def add_shifts(model: nn.Module) -> nn.Module:
    for name, module in model.named_modules():
        if name.endswith("q_proj"):
            module.__class__ = Shifted
            weight: Any = module.weight
            module.register_parameter("shift", nn.Parameter(torch.empty_like(weight)))
            mark(module, "shift", role="matrix", init="zeros")
    return model


def aliases(session: Any) -> list[Alias]:
    names = [name for name, _ in session.model.named_parameters() if not name.endswith(".shift")]
    return [Alias(name="mine/base", patterns=tuple(names), frozen=True, saved=False)]


def asks_for_its_table(config: Config) -> dict[str, Any]:
    return {"size": config.get("foreign").size}


FOREIGN = Architecture(
    class_name="Foreign", read=lambda keys: {}, write=asks_for_its_table, rules=lambda config: []
)


def plugins() -> Plugins:
    tuning = plugin_object(
        forge_model_transforms=[Transform(phase="modify", name="mine", apply=add_shifts)],
        forge_module_aliases=aliases,
    )
    foreign = plugin_object(forge_architectures=lambda: {"foreign": FOREIGN})
    return isolated_plugins({"mine": tuning, "foreign": foreign, "checkpoint": checkpoint_plugin})


def trained(folder: Path, name: str, **tables: Any) -> TinyRun:
    found = plugins()
    saving = {"interval": 2, "init_partial": True}
    config = tiny_config(
        plugins=found, checkpoint=saving, run={"name": name}, optimizer={"lr": 0.1}, **tables
    )
    return run_tiny(config, found, steps=2, folder=folder)


def tuned(folder: Path) -> tuple[TinyRun, TinyRun]:
    base = trained(folder, "base")
    return base, trained(folder, "tuned", mine=True, train={"seed": 7}, model={"init_from": str(base.folder)})


def exported(run: Path, out: Path) -> TensorFolder:
    found = plugins()
    export_hf(open_model(run, plugins=found), out, plugins=found)
    return TensorFolder(out)


def test_what_is_left_out_comes_from_the_start_and_parts_are_merged(tmp_path: Path) -> None:
    base, run = tuned(tmp_path)
    found = exported(run.folder, tmp_path / "out")
    for layer in range(2):
        at = f"layers.{layer}.attn.q_proj"
        merged = run.weights[f"{at}.weight"] + run.weights[f"{at}.shift"]
        assert run.weights[f"{at}.weight"].equal(base.weights[f"{at}.weight"])
        assert not merged.equal(base.weights[f"{at}.weight"])
        assert found.read(f"model.{at}.weight".replace("attn", "self_attn")).equal(merged)
    assert found.read("model.embed_tokens.weight").equal(base.weights["embed.weight"])
    assert len(found.names()) == len(base.weights)


def test_a_model_of_which_a_part_was_saved_is_used_whole(tmp_path: Path) -> None:
    _, run = tuned(tmp_path)
    with using(open_model(run.folder, plugins=plugins())) as session:
        there = dict(session.model.named_parameters())
    assert there.keys() == run.weights.keys()
    assert all(there[name].equal(value) for name, value in run.weights.items())


def test_without_a_folder_what_is_left_out_comes_from_the_seed(tmp_path: Path) -> None:
    run = trained(tmp_path, "seeded", mine=True)
    with using(open_model(run.folder, plugins=plugins())) as session:
        there = dict(session.model.named_parameters())
    assert all(there[name].equal(value) for name, value in run.weights.items())


def test_a_start_that_is_gone_is_named(tmp_path: Path) -> None:
    base, run = tuned(tmp_path)
    base.folder.rename(tmp_path / "elsewhere")
    with pytest.raises(
        RequestError, match=r"leaves out 21 tensors, .*init_from = .*base: there is no folder"
    ):
        exported(run.folder, tmp_path / "out")


def test_a_stranger_that_asks_for_its_table_does_not_end_the_search() -> None:
    found = plugins()
    config = tiny_config(plugins=found)
    with pytest.raises(RequestError, match="no architecture of Hugging Face"):
        choose(config, ["of.nobody"], plugins=found)
    with pytest.raises(RequestError, match=r"foreign says no table \[foreign\]"):
        choose(config, ["embed.weight"], "foreign", plugins=found)
