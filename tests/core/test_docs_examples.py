"""The examples of docs/hooks.md and docs/testing.md run."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_template import DOCS, blocks

from forge_core.config import ConfigError, key, table
from forge_core.contract import Component
from forge_core.plugins import Plugins
from forge_core.testing import WorkerPool, isolated_plugins, plugin_object, run_tiny, tiny_config

HOOKS = (DOCS / "hooks.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### `(forge_\w+)\(.*?`\n(.*?)(?=^##|\Z)", HOOKS, re.MULTILINE | re.DOTALL))
EXAMPLES = {
    name: re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for name, text in SECTIONS.items()
}
UNSEEN = {
    "forge_tables",
    "forge_components",
    "forge_architectures",
    "forge_problems",
    "forge_flops",
    "forge_build_initial_weights",
    "forge_explanations",
}
"""Hooks whose answers are no part of the plan, or which nobody asks here."""
DECLINING = {"forge_build_data", "forge_build_checkpointer"}
"""Hooks whose examples decline here."""


def module(name: str, source: str) -> ModuleType:
    made = ModuleType(name)
    sys.modules[name] = made
    exec(compile(source, name, "exec"), made.__dict__)
    return made


@pytest.mark.parametrize("hook", EXAMPLES)
def test_an_example_is_a_plugin_that_trains(hook: str) -> None:
    (source,) = EXAMPLES[hook]
    assert "import torch" not in source.split("@hookimpl")[0], "it must not import torch at the top"
    plugins = isolated_plugins({"mine": module(f"example_of_{hook}", source)})
    assert list(plugins.load("mine").implementations) == [hook]
    config = tiny_config(plugins=plugins, mine=True, model={"vocab_size": 256})
    run = run_tiny(config, plugins, steps=2)
    assert run.status == 0
    contributed = {entry.hook for entry in run.session.plan.entries if entry.plugin == "mine"}
    assert contributed == ({hook} - UNSEEN - DECLINING)


@table
class SgdOptions:
    """Options of the part that the page names."""

    momentum: float = key(0.0, ge=0.0, help="Of the running mean.")


def test_options_of_a_part_stand_where_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below each table that picks parts, in a file and as a flag."""
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", SECTIONS["forge_components"], re.MULTILINE | re.DOTALL)
    (flag,) = re.findall(r"`(--optimizer\.\S+)`", SECTIONS["forge_components"])
    places = re.findall(r'`\[(\w+)\."(mine/\w+)"\]`', SECTIONS["forge_components"])
    made = ModuleType("options_of_docs")
    made.SgdOptions = SgdOptions  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    options = f"{made.__name__}:SgdOptions"
    categories = {"data": "data_source", "metrics": "writer", "optimizer": "optimizer"}
    names = [*places, ("optimizer", "mine/sgd")]
    assert [place for place, _ in names] == ["data", "metrics", "optimizer"]
    parts = [
        Component(category=categories[place], name=name.partition("/")[2], target=options, options=options)
        for place, name in names
    ]
    tables = tomllib.loads(shown)
    tables |= {place: {name: {"momentum": 0.25}} for place, name in places}

    def plugins() -> Plugins:
        return isolated_plugins({"mine": plugin_object(forge_components=parts)})

    config = tiny_config(plugins=plugins(), **tables)
    assert [config.options(place, name).momentum for place, name in names] == [0.25, 0.25, 0.5]
    config = tiny_config(flag, plugins=plugins(), optimizer={"name": "mine/sgd"})
    assert config.options("optimizer", "mine/sgd").momentum == 0.5
    with pytest.raises(ConfigError, match="must be >= 0"):
        tiny_config(flag.replace("=0.5", "=-1"), plugins=plugins())


def test_the_page_on_testing_works(
    pool2: WorkerPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its blocks run from top to bottom; what it shows as tests is called."""
    for number, (language, text) in enumerate(blocks(DOCS / "testing.md")):
        assert language == "python"
        name = f"page_on_testing_{number}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        made: Any = __import__(name)
        if "test_ranks_add_up" in text:
            made.test_ranks_add_up(pool2)
        if "TestMine" in text:
            assert made.TestMine.plugin == "mine"
    assert Plugins().names() is not None
