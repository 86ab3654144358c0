"""Hooks that answer before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pluginkit import installed, package

from forge_core.config import Config, ConfigError, Problem, key, table
from forge_core.config.tables import ModelConfig, TrainConfig
from forge_core.contract import Architecture, Component, Flops, MeshAxis
from forge_core.errors import PluginError
from forge_core.loop.explain import explain
from forge_core.loop.flops import flops_of
from forge_core.plugins import PluginCatalog, Plugins, known_architectures
from forge_core.testing import isolated_plugins, plugin_object, run_tiny, tiny_config


@table
class MineConfig:
    """A table for tests."""

    weight: float = key(0.5, ge=0, help="A number.")
    twice: float | None = key(None, help="Another one.", derived="2 * weight")

    def resolve(self, config: Config) -> MineConfig:
        return self if self.twice is not None else MineConfig(weight=self.weight, twice=2 * self.weight)


def test_hook_tables() -> None:
    """The plugin's table is read into its class, with bounds, flags and derived values."""
    plugins = isolated_plugins({"mine": plugin_object(forge_tables=lambda: MineConfig)})
    config = tiny_config("--mine.weight=2", plugins=plugins, mine=True)
    assert config[MineConfig] == MineConfig(weight=2.0, twice=4.0)
    assert config.origin("mine.twice") == "derived"
    with pytest.raises(ConfigError) as caught:
        tiny_config(plugins=plugins, mine={"weigth": 1.0, "twice": "a"})
    assert {problem.path for problem in caught.value.problems} == {"mine.weigth", "mine.twice"}
    with pytest.raises(KeyError):
        tiny_config(plugins=plugins)[MineConfig]


def test_hook_tables_that_are_no_tables_are_refused() -> None:
    plugins = isolated_plugins({"mine": plugin_object(forge_tables=lambda: {"weight": 1})})
    with pytest.raises((PluginError, ConfigError), match="forge_tables returned"):
        tiny_config(plugins=plugins, mine={"weight": 1})


COMPONENT = """
    import torch
    from forge_core import hookimpl
    from forge_core.config import key, table
    from forge_core.contract import Component

    @table
    class Options:
        \"\"\"Options of plain descent.\"\"\"

        momentum: float = key(0.0, ge=0, help="Of SGD.")

    @hookimpl
    def forge_components():
        parts = {"target": __name__ + ":build", "options": __name__ + ":Options"}
        return [Component(category="optimizer", name="sgd", **parts)]

    def build(groups, config, options):
        return torch.optim.SGD(groups, lr=config.lr, momentum=options.momentum)
"""


def test_hook_components(tmp_path: Path) -> None:
    """A third party's optimizer is picked as `plugin/name`, which loads it; its options are checked."""
    with installed([package(tmp_path, "mine", COMPONENT)]):
        plugins = Plugins()
        optimizer = {"name": "mine/sgd", "mine/sgd": {"momentum": 0.25}}
        run = run_tiny(tiny_config(plugins=plugins, optimizer=optimizer), plugins, steps=2)
        built = run.session.optimizers["main"].optimizer
        assert type(built).__name__ == "SGD"
        assert {group["momentum"] for group in built.param_groups} == {0.25}
        with pytest.raises(ConfigError, match="momentom"):
            tiny_config(plugins=Plugins(), optimizer={"name": "mine/sgd", "mine/sgd": {"momentom": 1}})


def test_a_part_that_cannot_be_imported_names_its_target() -> None:
    parts = [
        Component(category="optimizer", name="gone", target="json:no_such_function"),
        Component(category="optimizer", name="away", target="no_such_package.x:y"),
    ]
    plugins = isolated_plugins({"mine": plugin_object(forge_components=parts)})
    catalog = PluginCatalog(plugins)
    for name, target in (("gone", "json:no_such_function: Attr"), ("away", "no_such_package.x:y: Module")):
        with pytest.raises(PluginError, match=f"optimizer 'mine/{name}' cannot be imported from {target}"):
            catalog.load("optimizer", f"mine/{name}")


def test_hook_problems() -> None:
    """What plugins find is reported together, with the number of processes at hand and the value's origin."""

    def forge_problems(config: Config, world_size: int, axes: Any) -> Any:
        sizes = {axis.name: axis.size for axis in axes}
        assert sizes == {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}
        yield Problem("model.dim", f"{config[ModelConfig].dim} on {world_size} is not mine", "take another")

    plugins = isolated_plugins(
        {name: plugin_object(forge_problems=forge_problems) for name in ("left", "right")}
        | {"other": plugin_object(forge_problems=[Problem("train.seed", "is odd")])}
    )
    with pytest.raises(ConfigError) as caught:
        tiny_config("--train.seed=7", plugins=plugins, left=True, other=True)
    messages = {problem.path: str(problem) for problem in caught.value.problems}
    assert "16 on 1 is not mine (take another)" in messages["model.dim"]
    assert messages["train.seed"] == "--train.seed=7: train.seed: is odd"


def test_a_plugin_that_cannot_look_keeps_no_other_from_being_heard() -> None:
    """An exception that problems at hand may have caused hides neither what its plugin said before it nor
    what those behind it say. Where there is no problem, it is raised."""

    def stumbles(config: Config) -> Any:
        if config[ModelConfig].dim == 16:  # the default: the configured value did not convert
            raise ZeroDivisionError("nothing to divide")
        yield Problem("model.dim", "is not 16")

    first = plugin_object(forge_problems=stumbles)
    behind = plugin_object(forge_problems=[Problem("train.seed", "is odd")])
    plugins = isolated_plugins({"first": first, "second": behind})
    with pytest.raises(ConfigError) as caught:
        tiny_config("--train.grad_clip_norm=much", plugins=plugins, first=True, second=True)
    assert {p.path for p in caught.value.problems} == {"train.grad_clip_norm", "train.seed"}
    alone = isolated_plugins({"first": first})
    with pytest.raises(ZeroDivisionError, match="nothing to divide"):
        tiny_config(plugins=alone, first=True)


def test_hook_mesh_axes() -> None:
    """Axes of plugins take their place among the core's."""
    axis = MeshAxis(name="mine", size=1, place=45)
    plugins = isolated_plugins({"mine": plugin_object(forge_mesh_axes=[axis])})
    found = explain(tiny_config(plugins=plugins, mine=True), plugins)
    names = [axis["name"] for axis in found["mesh"]]
    assert names.index("cp") < names.index("mine") < names.index("tp")
    clash = isolated_plugins({"mine": plugin_object(forge_mesh_axes=[MeshAxis(name="tp", size=1, place=1)])})
    with pytest.raises(PluginError, match="plugins core and mine both have the mesh axis 'tp'"):
        explain(tiny_config(plugins=clash, mine=True), clash)


def test_hook_flops() -> None:
    """FLOPs add up over plugins, differences may be negative, and they are what MFU divides."""
    plugins = isolated_plugins(
        {
            "more": plugin_object(forge_flops=1000.0),
            "less": plugin_object(forge_flops=np.float32(-250.0)),
            "none": plugin_object(forge_flops=lambda config: None),
        }
    )
    alone = explain(tiny_config(), isolated_plugins())["step"]["flops_per_token"]
    config = tiny_config(plugins=plugins, more=True, less=True, none=True, metrics={"peak_tflops": 1.0})
    assert explain(config, plugins)["step"]["flops_per_token"] == alone + 750
    record = run_tiny(config, plugins).records[-2]
    expected = (alone + 750) * record["train/tokens_per_sec"] / 1e12
    assert record["train/mfu"] == pytest.approx(expected)


def test_hook_flops_of_what_is_counted() -> None:
    """By the piece, as the counts of a step have it, and by what trains."""
    asked: list[tuple[bool, bool]] = []

    def told(config: Config, trains: Callable[[str], bool]) -> Flops:
        asked.append((trains("head"), trains("blocks")))
        return Flops(
            token=10.0, counted={"sequences": 5e6 if trains("head") else 1e6}, most={"sequences": 0.25}
        )

    plugins = isolated_plugins({"mine": plugin_object(forge_flops=told)})
    alone = explain(tiny_config(), isolated_plugins())["step"]["flops_per_token"]
    stages = {"modules": ["head"], "stages": [{"start_step": 3, "modules": ["blocks"]}]}
    tables: dict[str, Any] = {"metrics": {"peak_tflops": 1.0, "log_interval": 1}, "train": {"max_steps": 4}}
    config = tiny_config(plugins=plugins, mine=True, freeze=stages, **tables)
    run = run_tiny(config, plugins)
    assert asked[-2:] == [(False, True), (True, False)]
    spared = flops_of(run.session)
    assert spared is not None
    assert spared.expected == spared.token + 5e6 * 0.25
    records = [record for record in run.records if "train/mfu" in record]
    each = config[TrainConfig].batch_size
    for record, piece in zip(records, (1e6, 1e6, 5e6, 5e6), strict=True):
        seconds = record["train/step_time_sec"]
        tokens = record["train/tokens_per_sec"] * seconds
        rest = record["train/mfu"] * seconds * 1e12 - each * piece
        assert 0 < rest < tokens * (alone + 10.0)
        if piece == 5e6:
            assert rest == pytest.approx(tokens * spared.token)


def test_hook_architectures() -> None:
    """Mappings of all plugins come together by model type, each from one plugin."""

    def of(class_name: str) -> Architecture:
        return Architecture(class_name=class_name, read=lambda c: {}, write=lambda c: {}, rules=lambda c: [])

    plugins = isolated_plugins(
        {
            "a": plugin_object(forge_architectures={"one": of("One")}),
            "b": plugin_object(forge_architectures={"two": of("Two")}),
            "c": plugin_object(forge_architectures={"one": of("Other")}),
        }
    )
    for name in "ab":
        plugins.load(name)
    answers = plugins.collect("forge_architectures")
    found = {c.value[0]: (c.plugin, c.value[1].class_name) for c in answers if c.plugin != "core"}
    assert found == {"one": ("a", "One"), "two": ("b", "Two")}
    plugins.load("c")
    with pytest.raises(PluginError, match="plugins a and c both have the architecture 'one'"):
        plugins.collect("forge_architectures")


def test_a_plugin_that_fails_keeps_nobody_from_the_architectures_of_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> Any:
        raise ImportError("no module named elsewhere")

    plugins = isolated_plugins({"broken": plugin_object(forge_architectures=fails)})
    known = known_architectures(plugins)
    assert "llama" in {each.name for each in known}
    assert {each.plugin for each in known} == {"core"}
    assert "plugin broken does not give its architectures: ImportError: no module named" in caplog.text
