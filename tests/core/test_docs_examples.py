"""The examples of docs/hooks.md and docs/testing.md run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_template import DOCS, blocks

from forge_core.plugins import Plugins
from forge_core.testing import WorkerPool, isolated_plugins, run_tiny, tiny_config

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
