"""The package of docs/vlm.md as it is written there, and runs with its parts."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vlmkit import Tables
from vlmruns import of

from forge_core.plugins import Plugins
from forge_core.testing import isolated_plugins, run_tiny, tiny_config

PAGE = Path(__file__).parents[2] / "docs" / "vlm.md"
BLOCK = re.compile(r"^```\w+\n# file: (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SIZES: dict[str, Any] = {"image_size": 8, "patch_size": 4, "dim": 16}


def write_package(folder: Path) -> Path:
    """The folder that holds the package."""
    found = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    for name, text in found:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "src" / "forge_glance" / "__init__.py").touch()
    return folder / "src"


def with_parts(package: Path) -> Plugins:
    """forge-vlm, the package, and what else is installed of ours."""
    import forge_vlm.plugin

    if str(package) not in sys.path:
        sys.path.insert(0, str(package))
    found = {"vlm": forge_vlm.plugin, "glance": import_module("forge_glance.plugin")}
    if find_spec("forge_pp"):
        found["pp"] = import_module("forge_pp.plugin")
    return isolated_plugins(found)


def tables_of_parts(folder: Path, *layout: int, **more: dict[str, Any]) -> Tables:
    """A run with every part of the page but the policy, and an encoder that trains."""
    vlm = {
        "fusion": "glance/mean",
        "encoder": {"name": "glance/flat", "glance/flat": SIZES, "frozen": False},
        "connector": {"name": "glance/queries"},
    }
    found = of(folder, *layout, vlm=vlm, **more)
    found["vlm"]["metrics"] = ["glance/length"]
    return found


def run_with_parts(package: Path, found: Tables) -> dict[str, Any]:
    """What a run leaves behind, as plain data."""
    plugins = with_parts(package)
    done = run_tiny(tiny_config(plugins=plugins, **found), plugins)
    return {
        "losses": done.losses,
        "norms": done.grad_norms,
        "eval": done.metric("eval/loss"),
        "length": done.metric("eval/glance/length"),
        "weights": dict(done.weights),
    }
